"""The demo's result as a table for the terminal."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from stepwell.demo.results import Cell, Results, Row
from stepwell.demo.workload import Phase

TITLES = {
    Phase.DOCUMENTS: "long documents, asked about in turn",
    Phase.CHATS: "interleaved chats, whole history each turn",
    Phase.RESTART: "engine restarted, first questions again",
}


def table(results: Results) -> Table:
    """Two lines a phase: without and with Stepwell."""
    view = Table(box=SIMPLE_HEAD, title="The same requests without and with Stepwell", title_justify="left")
    view.add_column("phase\n", max_width=25)
    view.add_column("\n")
    for heading in ("first token\np50", "first token\np95", "whole\ntime"):
        view.add_column(heading, justify="right")
    for heading in ("prompt tokens\ncomputed", "hit in\nengine", "hit in\nStepwell"):
        view.add_column(heading, justify="right")
    view.add_column("faster: first\ntoken / whole", justify="right")
    view.add_column("answers\nequal", justify="right")
    for row in results.rows:
        view.add_row(TITLES[row.phase], "without", *_figures(row.without), "", "")
        view.add_row("", "[bold]with", *_figures(row.with_stepwell), *_verdict(row), end_section=True)
    return view


def _figures(cell: Cell) -> tuple[str, ...]:
    times = (cell.first_token_p50_s, cell.first_token_p95_s, cell.whole_s)
    counts = (cell.tokens.computed, cell.tokens.engine_hit, cell.tokens.stepwell_hit)
    return (*(f"{time:.2f} s" for time in times), *(f"{count:,}" for count in counts))


def _verdict(row: Row) -> tuple[str, str]:
    speed_ups = f"[bold]{row.first_token_speed_up:.1f} x[/] / {row.whole_speed_up:.1f} x"
    return speed_ups, f"{row.answers_equal} of {row.requests}"
