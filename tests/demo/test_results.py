"""The table's figures, and the report that is drawn from them."""

import re
from io import StringIO
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stepwell.demo.client import Answer
from stepwell.demo.measure import PromptTokens
from stepwell.demo.report import picture, report
from stepwell.demo.results import Measured, PhaseTokens, Results, Run, percentile, rows
from stepwell.demo.table import table
from stepwell.demo.workload import Phase


def run_of(first_token_s: list[float], text: str, stepwell_hit: int) -> Run:
    """Three requests about documents, one after the restart."""
    phases = [Phase.DOCUMENTS, Phase.DOCUMENTS, Phase.DOCUMENTS, Phase.RESTART]
    measured = [
        Measured(
            phase, f"document <{number}> & more", Answer(text, 3000, stepwell_hit, seconds, seconds + 1.0)
        )
        for number, (phase, seconds) in enumerate(zip(phases, first_token_s, strict=True))
    ]
    tokens = PromptTokens(3000 - stepwell_hit, 0, stepwell_hit)
    return Run(
        requests=tuple(measured),
        phases=(PhaseTokens(Phase.DOCUMENTS, tokens), PhaseTokens(Phase.RESTART, tokens)),
        engine_start_s=(20.0, 21.0),
    )


def results() -> Results:
    without = run_of([4.0, 6.0, 5.0, 8.0], "same", 0)
    with_stepwell = run_of([5.0, 0.5, 0.4, 0.25], "same", 2944)
    return Results(
        machine="2 <cores> & some memory",
        model="a model",
        engine="vLLM 0.32.0",
        engine_cache_tokens=4608,
        rows=rows(without, with_stepwell),
        without=without,
        with_stepwell=with_stepwell,
    )


def test_rows_compare_the_two_runs_phase_by_phase() -> None:
    documents, restart = results().rows
    assert (documents.phase, documents.requests, documents.answers_equal) == (Phase.DOCUMENTS, 3, 3)
    assert documents.without.first_token_p50_s == 5.0
    assert documents.without.first_token_p95_s == 6.0
    assert documents.without.whole_s == pytest.approx(18.0)
    assert documents.with_stepwell.tokens == PromptTokens(56, 0, 2944)
    assert documents.first_token_speed_up == pytest.approx(10.0)
    assert documents.whole_speed_up == pytest.approx(18.0 / 8.9)
    assert restart.first_token_speed_up == pytest.approx(32.0)


def test_answers_that_differ_are_not_counted_as_equal() -> None:
    documents, restart = rows(run_of([1.0] * 4, "one", 0), run_of([1.0] * 4, "another", 0))
    assert (documents.answers_equal, restart.answers_equal) == (0, 0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[float], percent: int) -> None:
    value = percentile(values, percent)
    assert value in values
    assert sum(other <= value for other in values) * 100 >= percent * len(values)
    assert sum(other < value for other in values) * 100 < percent * len(values)


def test_the_table_shows_every_figure() -> None:
    output = StringIO()
    Console(width=80, file=output).print(table(results()))
    text = output.getvalue()
    assert "…" not in text  # nothing is cut off in 80 columns
    for figure in ("5.00", "6.00", "18.0", "2,944", "10.0 x", "2.0 x", "3 of 3", "32.0 x"):
        assert figure in text


def test_the_picture_has_a_bar_for_every_request_of_both_runs_in_proportion() -> None:
    svg = ElementTree.fromstring(picture(results()))
    bars = [rect for rect in svg.iter("rect") if rect.find("title") is not None]
    assert len(bars) == 8
    heights = [float(bar.attrib["height"]) for bar in bars]
    for height, seconds in zip(heights, [4.0, 6.0, 5.0, 8.0, 5.0, 0.5, 0.4, 0.25], strict=True):
        assert height / heights[3] == pytest.approx(seconds / 8.0, abs=0.002)
    hints = [bar.findtext("title") for bar in bars]
    assert (
        hints[0] == "document <0> & more, without: 4.00 s to the first token, 0 of 3,000 prompt tokens cached"
    )


def test_the_report_escapes_and_fetches_nothing() -> None:
    page = report(results())
    assert "2 &lt;cores&gt; &amp; some memory" in page and "<cores>" not in page
    assert "document &lt;0&gt;" in page
    assert not re.search(r"(src|href)=|url\(|@import|<script|https?://", page)
    well_formed = re.sub(r"<!doctype html>|<meta [^>]*>|<br>", "", page)
    assert ElementTree.fromstring(well_formed).tag == "html"
