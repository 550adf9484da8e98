"""Line charts as SVG, drawn by hand: the report must work without anything from anywhere."""

import math
from collections.abc import Sequence
from html import escape

import msgspec

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 12, 44
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2", "#e08e0b", "#444444")


class Line(msgspec.Struct, frozen=True):
    """One series, in order of x."""

    name: str
    points: list[tuple[float, float]]
    is_dashed: bool = False


def line_chart(lines: Sequence[Line], x_name: str, y_name: str, *, is_y_log: bool = False) -> str:
    """With a logarithmic x axis; points at 0 or below it are left out of it."""
    shown = [
        Line(
            line.name,
            [(x, y) for x, y in line.points if x > 0 and math.isfinite(y) and (y > 0 or not is_y_log)],
            line.is_dashed,
        )
        for line in lines
    ]
    points = [point for line in shown for point in line.points]
    if not points:
        return "<p>Nothing to draw.</p>"
    x_axis = _Axis(min(x for x, _ in points), max(x for x, _ in points), True, _LEFT, _WIDTH - _RIGHT)
    y_low = min(y for _, y in points) if is_y_log else 0.0
    y_axis = _Axis(y_low, max(y for _, y in points), is_y_log, _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_name)}">']
    for value in x_axis.ticks():
        at = x_axis.at(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 14}" class="mid">{_short(value)}</text>')
    for value in y_axis.ticks():
        at = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" class="end">{_short(value)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" class="mid">{escape(x_name)}</text>')
    parts.append(f'<text x="4" y="{_TOP}" class="name">{escape(y_name)}</text>')
    for number, line in enumerate(shown):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line.points)
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{path}"/>')
        y = _TOP + 14 + 18 * number
        parts.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{y}" fill="{colour}">{escape(line.name)}</text>')
    parts.append("</svg>")
    return "".join(parts)


class _Axis:
    def __init__(self, low: float, high: float, is_log: bool, start: float, end: float) -> None:
        self._is_log = is_log
        if high <= low:
            high = low * 10 if is_log else low + 1
        self._low, self._high = low, high
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """On the paper."""
        low, high = self._low, self._high
        if self._is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self._start + (self._end - self._start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if self._is_log:
            first, last = math.ceil(math.log10(self._low)), math.floor(math.log10(self._high))
            found = [float(10**power) for power in range(first, last + 1)]
            return found or [self._low, self._high]
        step = 10 ** math.floor(math.log10((self._high - self._low) / 2))
        while (self._high - self._low) / step > 6:
            step *= 2
        return [step * number for number in range(math.ceil(self._low / step), int(self._high / step) + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"
