"""The report as one HTML file that needs nothing else."""

from collections.abc import Iterable, Sequence
from html import escape

from stepwell.replay.report.chart import Line, line_chart
from stepwell.replay.report.figures import Report
from stepwell.replay.report.verdict import Outcome, Verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin-top: 2em; border-top: 1px solid #ddd }
table { border-collapse: collapse; margin: .6em 0 } td, th { padding: .2em .8em .2em 0; text-align: left }
th { border-bottom: 1px solid #bbb } td.number { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; max-width: 720px; font: 11px system-ui, sans-serif } svg .grid { stroke: #e4e4e4 }
svg .mid { text-anchor: middle } svg .end { text-anchor: end }
.verdict { border-left: 5px solid; padding: .3em .8em; margin: .6em 0; background: #f7f7f7 }
.holds { border-color: #2e933c } .not { border-color: #d1495b } .open { border-color: #999 }
.small { color: #666; font-size: .9em }
"""
_CLASS = {Outcome.HOLDS: "holds", Outcome.DOES_NOT_HOLD: "not", Outcome.UNDECIDED: "open"}


def render(report: Report) -> str:
    """The whole page."""
    summary = report.summary
    head = (
        f"<h1>What tiered caching gives on this traffic</h1><p>{escape(', '.join(summary.sources))}<br>"
        f"{summary.requests:,} requests over {summary.span_s:,.0f} s, {summary.input_tokens:,} prompt and "
        f"{summary.output_tokens:,} output tokens, blocks of {summary.block_tokens} tokens. "
        f"{report.engines} engine(s) of {escape(report.model)} on {report.gpus_per_engine} x "
        f"{escape(report.gpu)}.</p>"
        + "".join(f'<p class="small">Note: {escape(warning)}</p>' for warning in summary.warnings)
        + "".join(f'<p class="small">{escape(k)}: {escape(v)}</p>' for k, v in report.facts.items())
    )
    sections = (
        _ceiling(report),
        _curves(report),
        _sources(report),
        _break_even(report),
        _truncation(report),
        _congestion(report),
        _needed(report),
        _money(report),
        _sensitivity(report),
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Stepwell replay</title>'
        f"<style>{_STYLE}</style></head><body>{head}{''.join(sections)}</body></html>\n"
    )


def _ceiling(report: Report) -> str:
    part = report.ceiling
    rows = [
        ("of blocks", f"{part.hit_rate_blocks:.2%}"),
        ("of prompt tokens", f"{part.hit_rate_tokens:.2%}"),
        (
            "bound of throughput",
            "none" if part.throughput_bound is None else f"{part.throughput_bound:.2f} x",
        ),
    ]
    return _section("1. Ceiling: an infinite cache", _table(("hit rate", ""), rows), part.verdicts)


def _curves(report: Report) -> str:
    part = report.curves
    policies = dict.fromkeys(each.policy for each in part.hits)
    lines = [
        Line(
            policy,
            [
                (each.capacity_blocks, 100 * each.hit_rate_blocks)
                for each in part.hits
                if each.policy == policy
            ],
            policy == "optimum",
        )
        for policy in policies
    ]
    lru = [each for each in part.hits if each.policy == "lru"]
    rows = []
    for tier, blocks in part.tier_blocks.items():
        fitting = [each.hit_rate_blocks for each in lru if each.capacity_blocks <= blocks]
        rows.append((tier, f"{blocks:,}", f"{max(fitting, default=0.0):.1%}"))
    return _section(
        "2. Hit rate against capacity",
        line_chart(lines, "capacity, blocks", "% of blocks hit")
        + _table(("tier", "blocks", "lru, alone, at least"), rows),
        part.verdicts,
    )


def _sources(report: Report) -> str:
    part = report.sources
    side = part.comparison.with_tiers or part.comparison.without
    rows = [
        (tier, f"{tokens:,}", f"{tokens / max(1, side.prompt_tokens):.2%}")
        for tier, tokens in [*side.hit_tokens.items(), ("computed", side.computed_tokens)]
    ]
    times = [
        (name, *(f"{each.ttft_s.get(key, 0.0):.3f}" for key in ("mean", "p50", "p90", "p95", "p99")))
        for name, each in (("without tiers", part.comparison.without), ("with tiers", side))
    ]
    return _section(
        "3. Where each prompt token came from",
        _table(("from", "tokens", "share"), rows)
        + "<p>Seconds to the first token:</p>"
        + _table(("", "mean", "p50", "p90", "p95", "p99"), times),
        part.verdicts,
    )


def _break_even(report: Report) -> str:
    part = report.break_even
    contexts = [float(context) for context in part.context_tokens]
    needed = Line("needed", list(zip(contexts, [rate / 1e9 for rate in part.bytes_per_s], strict=True)))
    tiers = [
        Line(name, [(context, rate / 1e9) for context in contexts], True)
        for name, rate in part.tier_bytes_per_s.items()
    ]
    chart = line_chart([needed, *tiers], "tokens of context", "GB/s for one engine", is_y_log=True)
    text = "<p>Above the line of what is needed, loading a prompt is faster than computing it.</p>"
    return _section("4. Break-even bandwidth", text + chart, part.verdicts)


def _truncation(report: Report) -> str:
    part = report.truncation
    rows = [
        (
            "all" if each.kept_tokens is None else f"{each.kept_tokens:,}",
            f"{each.hit_rate_tokens:.2%}",
            f"{each.truncated_requests:,}",
        )
        for each in part.windows
    ]
    table = _table(("newest tokens kept", "hit rate of an infinite cache", "requests cut"), rows)
    return _section("5. What truncation costs", table, part.verdicts)


def _congestion(report: Report) -> str:
    part = report.congestion
    lines = [
        Line("with tiers", [(point.engines, point.ttft_mean_s) for point in part.points]),
        Line("without", [(point.engines, point.ttft_mean_without_s) for point in part.points], True),
    ]
    rows = [
        (str(point.engines), *(f"{name} {share:.0%}" for name, share in point.read_busy_share.items()))
        for point in part.points
    ]
    names = ["engines", *("reads busy" for _ in part.points[0].read_busy_share)]
    return _section(
        f"6. Many engines on the same tiers (first {part.requests:,} requests, as many for each engine)",
        line_chart(lines, "engines", "s to the first token, mean") + _table(names, rows),
        part.verdicts,
    )


def _needed(report: Report) -> str:
    part = report.needed
    rows = [
        (
            " + ".join(count.tiers) or "GPU cache alone",
            "not met" if count.engines is None else str(count.engines),
            "" if count.engines is None else str(count.engines * part.gpus_per_engine),
        )
        for count in part.counts
    ]
    text = (
        f"<p>Target: {part.target.percentile} of the time to the first token at most "
        f"{part.target.seconds:.3g} s, on the first {part.requests:,} requests.</p>"
    )
    ratio = "" if part.computed_ratio is None else f"<p>Prompt tokens computed: 1/{part.computed_ratio:.2f}. "
    bound = "" if part.bound is None else f"Bound of the throughput, 1/(1-h): {part.bound:.2f}.</p>"
    return _section(
        "7. GPUs for the same latency",
        text + _table(("tiers", "engines", "GPUs"), rows) + ratio + bound,
        part.verdicts,
    )


def _money(report: Report) -> str:
    part = report.money
    rows = [
        ("GPUs without tiers, USD an hour", _usd(part.gpu_usd_per_hour_without)),
        ("GPUs with tiers, USD an hour", _usd(part.gpu_usd_per_hour_with)),
        *((f"{name}, USD an hour", _usd(usd)) for name, usd in part.tiers_usd_per_hour.items()),
        ("a million prompt tokens without", _usd(part.usd_per_million_without)),
        ("a million prompt tokens with", _usd(part.usd_per_million_with)),
        *((f"{name}: cached token, of the price", f"{factor:g}") for name, factor in part.discounts.items()),
    ]
    return _section("8. Money", _table(("", ""), rows), part.verdicts)


def _sensitivity(report: Report) -> str:
    part = report.sensitivity
    rows = [
        (swing.name, f"{swing.ttft_ratio_halved:.2f}", f"{swing.ttft_ratio_doubled:.2f}")
        for swing in part.swings
    ]
    text = (
        f"<p>Mean time to the first token without tiers over with: {part.ttft_ratio:.2f}; and with one input "
        f"halved or doubled, on the first {part.requests:,} requests.</p>"
    )
    return _section("9. Sensitivity", text + _table(("input", "halved", "doubled"), rows), part.verdicts)


def _section(title: str, body: str, verdicts: Iterable[Verdict]) -> str:
    shown = "".join(
        f'<div class="verdict {_CLASS[each.outcome]}"><b>{escape(each.claim)}: {escape(each.outcome)}.</b> '
        f"{escape(each.measured)}. <span class='small'>{escape(each.flips)}.</span></div>"
        for each in verdicts
    )
    return f"<h2>{escape(title)}</h2>{body}{shown}"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' if number else ''}>{escape(cell)}</td>" for number, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _usd(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.2f}"
