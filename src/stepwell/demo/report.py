"""demo-report.html: one self-contained page with one picture of the two runs. No script, nothing fetched."""

import math
from collections.abc import Iterable, Sequence
from html import escape

import msgspec

from stepwell.demo.results import Cell, Measured, Results, Row
from stepwell.demo.table import TITLES

WIDTH, HEIGHT = 1080, 420
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 44, 40


class Series(msgspec.Struct, frozen=True):
    """How one run is drawn. `offset` is where its bar begins, as a share of a request's slot."""

    name: str
    colour: str
    offset: float
    legend_x: float


WITHOUT = Series("without", "#9aa4b2", 0.14, WIDTH - 230)
WITH = Series("with Stepwell", "#0b7285", 0.51, WIDTH - 140)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff;
       max-width: 1080px; margin: 40px auto; padding: 0 20px; }
h1 { font-size: 24px; margin: 0 0 4px; } p { color: #52606d; margin: 0 0 20px; max-width: 80ch; }
svg { width: 100%; height: auto; display: block; margin: 0 0 24px; }
text { font: 12px system-ui, sans-serif; fill: #52606d; } text.phase { font-weight: 600; fill: #1d2733; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
th { font-weight: 600; color: #52606d; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; white-space: normal; }
tr.with td { border-bottom: 2px solid #cbd2d9; } tr.with td:nth-child(n+2) { font-weight: 600; }
"""


def report(results: Results) -> str:
    """The whole page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Stepwell: the demo</title>
<style>{STYLE}</style>
</head>
<body>
<h1>The same requests without and with Stepwell</h1>
<p>{escape(results.engine)}, {escape(results.model)}, {escape(results.machine)}. The engine's own KV cache was
kept small on purpose: {results.engine_cache_tokens:,} tokens. Requests went one after another; both runs sent
the same prompts and ran the engine's own prefix cache.</p>
{picture(results)}
{_table(results.rows)}
</body>
</html>
"""


def picture(results: Results) -> str:
    """Time to first token of every request in both runs, as inline SVG; phases are marked."""
    requests = results.without.requests
    longest_s = max(request.answer.first_token_s for request in (*requests, *results.with_stepwell.requests))
    step_s = _tick_step(longest_s)
    top_s = step_s * math.ceil(longest_s / step_s)
    slot = (WIDTH - LEFT - RIGHT) / len(requests)
    body = [
        *_grid(step_s, top_s),
        *_phases(requests, slot),
        *_bars(requests, slot, top_s, WITHOUT),
        *_bars(results.with_stepwell.requests, slot, top_s, WITH),
        *_legend(),
    ]
    label = "Time to first token of every request, without and with Stepwell"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n'
        + "\n".join(body)
        + "\n</svg>"
    )


def _y(seconds: float, top_s: float) -> float:
    return HEIGHT - BOTTOM - seconds / top_s * (HEIGHT - TOP - BOTTOM)


def _tick_step(longest_s: float) -> float:
    """The step of 1, 2 or 5 times a power of ten that gives 3 to 8 grid lines."""
    power = 10.0 ** math.floor(math.log10(longest_s / 3))
    return next(power * factor for factor in (1, 2, 5, 10) if longest_s / (power * factor) <= 7)


def _grid(step_s: float, top_s: float) -> Iterable[str]:
    for tick in range(round(top_s / step_s) + 1):
        y = _y(tick * step_s, top_s)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * step_s:g} s</text>'


def _phases(requests: Sequence[Measured], slot: float) -> Iterable[str]:
    starts = [
        index
        for index, request in enumerate(requests)
        if index == 0 or request.phase != requests[index - 1].phase
    ]
    for start, end in zip(starts, [*starts[1:], len(requests)], strict=True):
        left, width = LEFT + start * slot, (end - start) * slot
        if start > 0:
            yield (
                f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{TOP - 8}" y2="{HEIGHT - BOTTOM + 24}" '
                'stroke="#9aa4b2" stroke-dasharray="3 4"/>'
            )
        yield (
            f'<text class="phase" x="{left + width / 2:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
            f"{escape(requests[start].phase)}</text>"
        )


def _bars(requests: Sequence[Measured], slot: float, top_s: float, series: Series) -> Iterable[str]:
    for index, request in enumerate(requests):
        answer = request.answer
        y = _y(answer.first_token_s, top_s)
        hint = (
            f"{request.name}, {series.name}: {answer.first_token_s:.2f} s to the first token, "
            f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} prompt tokens cached"
        )
        yield (
            f'<rect x="{LEFT + (index + series.offset) * slot:.1f}" y="{y:.1f}" width="{slot * 0.35:.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{series.colour}"><title>{escape(hint)}</title></rect>'
        )


def _legend() -> Iterable[str]:
    yield f'<text class="phase" x="{LEFT}" y="18">Time to first token, request by request</text>'
    for series in (WITHOUT, WITH):
        yield f'<rect x="{series.legend_x}" y="8" width="12" height="12" fill="{series.colour}"/>'
        yield f'<text x="{series.legend_x + 18}" y="18">{series.name}</text>'


def _table(rows: Sequence[Row]) -> str:
    headings = (
        "phase",
        "",
        "first token<br>p50",
        "first token<br>p95",
        "whole<br>time",
        "prompt tokens<br>computed",
        "hit in<br>engine",
        "hit in<br>Stepwell",
        "faster: first<br>token / whole",
        "answers<br>equal",
    )
    lines = ["<table>", "<tr>" + "".join(f"<th>{heading}</th>" for heading in headings) + "</tr>"]
    for row in rows:
        speed_ups = f"{row.first_token_speed_up:.1f} × / {row.whole_speed_up:.1f} ×"  # noqa: RUF001
        equal = f"{row.answers_equal} of {row.requests}"
        lines.append(_line("without", TITLES[row.phase], "without", row.without, ("", "")))
        lines.append(_line("with", "", "with Stepwell", row.with_stepwell, (speed_ups, equal)))
    return "\n".join([*lines, "</table>"])


def _line(css_class: str, title: str, run: str, cell: Cell, verdict: tuple[str, str]) -> str:
    cells = (
        title,
        run,
        f"{cell.first_token_p50_s:.2f} s",
        f"{cell.first_token_p95_s:.2f} s",
        f"{cell.whole_s:.1f} s",
        f"{cell.tokens.computed:,}",
        f"{cell.tokens.engine_hit:,}",
        f"{cell.tokens.stepwell_hit:,}",
        *verdict,
    )
    return f'<tr class="{css_class}">' + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>"
