"""The demo's result as a table for the terminal, 80 columns wide."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from stepwell.demo.results import Cell, Results
from stepwell.demo.workload import Phase

TITLES = {
    Phase.DOCUMENTS: "long documents, asked about in turn",
    Phase.CHATS: "interleaved chats, whole history each turn",
    Phase.RESTART: "engine restarted, first questions again",
    Phase.DISK: "engine and cache server restarted, again",
}
HEADINGS = (
    "TTFT\np50 s",
    "TTFT\np95 s",
    "whole\ntime s",
    "tokens\ncomputed",
    "hit in\nengine",
    "hit in\nStepwell",
    "faster\nTTFT",
    "faster\nwhole",
    "answers\nequal",
)
CAPTION = (
    "TTFT: time to first token. Whole time: all requests of the part, one after another. "
    "Tokens: prompt tokens by where their KV came from, as vLLM counts them. "
    "Faster: without over with, TTFT by its median."
)


def table(results: Results) -> Table:
    """Two lines a phase: without Stepwell, then with it."""
    view = Table(
        box=SIMPLE_HEAD,
        padding=0,
        title="The same requests without and with Stepwell",
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
    )
    view.add_column("\n", no_wrap=True)
    for heading in HEADINGS:
        view.add_column(heading, justify="right", no_wrap=True)
    for row in results.rows:
        view.add_row(row.phase, *_figures(row.without))
        view.add_row(
            "[bold]+ Stepwell",
            *_figures(row.with_stepwell),
            f"[bold]{row.first_token_speed_up:.1f} x",
            f"{row.whole_speed_up:.1f} x",
            f"{row.answers_equal} of {row.requests}",
            end_section=True,
        )
    return view


def _figures(cell: Cell) -> tuple[str, ...]:
    times = (f"{cell.first_token_p50_s:.2f}", f"{cell.first_token_p95_s:.2f}", f"{cell.whole_s:.1f}")
    tokens = cell.tokens
    return (*times, *(f"{count:,}" for count in (tokens.computed, tokens.engine_hit, tokens.stepwell_hit)))
