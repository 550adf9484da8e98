"""The report's figures against what they are by hand, its verdicts at their thresholds, its page as HTML."""

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from report_kit import chats, spec

from stepwell.cli import main
from stepwell.replay.report.chart import Line, line_chart
from stepwell.replay.report.figures import SECTIONS, Report, make_report
from stepwell.replay.report.page import render
from stepwell.replay.report.scale import denser, head
from stepwell.replay.report.target import Target, fewest_engines, parse_target
from stepwell.replay.report.truncate import truncation
from stepwell.replay.report.verdict import Outcome, decide
from stepwell.replay.sim.simulate import simulate
from stepwell.replay.traces.prefixes import Prefixes
from stepwell.replay.traces.row import Row, Trace


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(chats(), spec(), sample_requests=150)


def test_every_section_ends_in_a_verdict(report: Report) -> None:
    assert len(SECTIONS) == 9
    for section in SECTIONS:
        verdicts = getattr(report, section).verdicts
        assert verdicts
        for verdict in verdicts:
            assert verdict.outcome in Outcome
            assert verdict.measured
            assert verdict.flips


def test_figures_agree_with_each_other(report: Report) -> None:
    side = report.sources.comparison.with_tiers
    assert side is not None
    assert side.hit_rate_tokens <= report.ceiling.hit_rate_tokens
    assert report.truncation.windows[0].hit_rate_tokens == report.ceiling.hit_rate_tokens
    assert report.ceiling.throughput_bound == pytest.approx(1 / (1 - report.ceiling.hit_rate_tokens))
    largest = max(report.curves.hits, key=lambda each: each.capacity_blocks)
    assert largest.hit_rate_blocks == pytest.approx(report.ceiling.hit_rate_blocks)
    assert [count.tiers for count in report.needed.counts] == [[], ["memory"], ["memory", "disk"]]
    assert report.needed.counts[0].engines is not None
    assert report.needed.counts[-1].engines is not None
    assert report.needed.counts[-1].engines <= report.needed.counts[0].engines


def test_break_even_says_where_each_tier_pays(report: Report) -> None:
    part = report.break_even
    for name, rate in part.tier_bytes_per_s.items():
        first = part.pays_from_tokens[name]
        for context, needed in zip(part.context_tokens, part.bytes_per_s, strict=True):
            assert (first is not None and context >= first) == (rate >= needed)


class Page(HTMLParser):
    """Collects what a browser would fetch, and checks that tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        assert tag not in ("script", "link", "iframe")
        self.headings += tag == "h2"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(report: Report) -> None:
    page = Page()
    page.feed(render(report))
    assert page.headings == 9
    assert page.open == []


def test_names_from_outside_are_escaped(report: Report) -> None:
    summary = msgspec.structs.replace(report.summary, sources=("<script>alert(1)</script>",))
    assert "<script" not in render(msgspec.structs.replace(report, summary=summary))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made.jsonl"
    assert main(["trace", "synth", "-o", str(made), "--requests", "120", "--block-tokens", "64"]) == 0
    page, figures = tmp_path / "out.html", tmp_path / "out.json"
    machines = [
        "--model",
        "Llama-3.1-8B",
        "--gpu",
        "L40S",
        "--tier",
        "memory=8GiB",
        "--tier",
        "disk=1TiB@2GB/s",
    ]
    arguments = [*machines, "--report", str(page), "--json", str(figures), "--target", "ttft_p90=1s"]
    assert main(["replay", str(made), *arguments]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "GB/s, " in capsys.readouterr().out
    result = json.loads(figures.read_text())
    assert set(SECTIONS) <= set(result["report"])
    assert result["report"]["needed"]["target"] == {"percentile": "p90", "seconds": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "x.html"], "say --model, --gpu and at least --tier memory=SIZE"),
        (["--model", "Llama-3.1-8B"], "--model and --gpu belong together"),
        (["--tier", "memory=1GiB"], "--tier needs --model and --gpu"),
        (["--model", "Llama-9", "--gpu", "H100"], "no model 'Llama-9' is known; did you mean llama-3.1-8b?"),
        (["--model", "Llama-3.1-8B", "--gpu", "H100", "--tier", "memry=1GiB"], "did you mean memory?"),
        (
            ["--model", "Llama-3.1-8B", "--gpu", "H100", "--tier", "disk=1GiB"],
            "the first --tier must be memory",
        ),
        (["--model", "Llama-3.1-8B", "--gpu", "H100", "--tier", "memory=1G"], "'1G' is not a size"),
        (["--model", "Llama-3.1-8B", "--gpu", "H100", "--tier", "memory"], "write NAME=SIZE"),
        (["--model", "Llama-3.1-70B", "--gpu", "H100", "--gpus", "1"], "leaves no room for its cache"),
        (["--model", "Llama-3.1-8B", "--gpu", "H100", "--engines", "0"], "at least 1 engine"),
        (["--model", "Llama-3.1-8B", "--gpu", "H100", "--peak-share", "1.5"], "peak-share is 1.5"),
        ([], "say --capacity-blocks N for hits alone, or --model and --gpu for times"),
    ],
)
def test_command_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made.jsonl"
    assert main(["trace", "synth", "-o", str(made), "--requests", "5"]) == 0
    assert main(["replay", str(made), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_truncation_by_hand() -> None:
    prefixes = Prefixes()
    # One conversation of 4, 6, 6 and 8 blocks; cut to 4, all but the equal ones begin elsewhere.
    turns = [range(4), range(6), range(6), range(8)]
    rows = tuple(
        Row(float(at), 16 * len(turn), 1, 0, prefixes.path("", list(turn))) for at, turn in enumerate(turns)
    )
    whole, cut = truncation(Trace(rows, 16, len(prefixes), (), 0, ()), [64])
    assert whole.hit_rate_tokens == (0 + 4 + 6 + 6) / 24
    assert (cut.hit_rate_tokens, cut.truncated_requests) == (4 / 16, 3)


def test_fewest_engines_is_the_fewest() -> None:
    trace, plain = denser(head(chats(), 100), 20.0), spec()
    target = Target("p90", 0.4)
    found = fewest_engines(trace, plain, target)
    assert found is not None
    assert found > 1
    assert target.met_by(simulate(trace, msgspec.structs.replace(plain, engines=found)))
    assert not target.met_by(simulate(trace, msgspec.structs.replace(plain, engines=found - 1)))
    assert fewest_engines(trace, plain, Target("p50", 1e-6)) is None


@pytest.mark.parametrize("text", ["ttft_p95", "ttft_p42=1s", "p95=fast", "=1s"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_target(text)
    assert parse_target("ttft_p95=1500ms") == parse_target("p95=1.5s") == Target("p95", 1.5)


def test_verdicts() -> None:
    assert decide("c", True, "m", "f").outcome is Outcome.HOLDS
    assert decide("c", False, "m", "f").outcome is Outcome.DOES_NOT_HOLD
    assert decide("c", None, "m", "f").outcome is Outcome.UNDECIDED


@pytest.mark.parametrize("is_y_log", [True, False])
def test_charts_draw_within_the_paper(is_y_log: bool) -> None:
    lines = [Line("a<b", [(1, 0), (10, 5), (1e6, 70)]), Line("flat", [(1, 3), (100, 3)], True)]
    root = ElementTree.fromstring(line_chart(lines, "x", "y", is_y_log=is_y_log))
    drawn = [each for each in root if each.tag == "polyline"]
    assert len(drawn) == 2
    for line in drawn:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 640
            assert 0 <= y <= 300
    assert "Nothing to draw" in line_chart([], "x", "y")
