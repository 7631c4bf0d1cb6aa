"""Geometry of the report's charts: data in, SVG path strings and ticks out. No markup here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.telemetry.charts import OTHER, Chart, Series

WIDTH, HEIGHT = 360, 196
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 24
OTHER_COLOR = 5
"""Index of the neutral colour."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Shape:
    """One path. ``kind`` and ``color`` are CSS classes: ``line``, ``band`` or ``layer``."""

    kind: str
    color: int
    d: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Plot:
    """A chart in pixels of a ``WIDTH`` x ``HEIGHT`` view box."""

    title: str
    unit: str
    shapes: list[Shape]
    dots: list[tuple[int, float, float]]
    """(color, x, y)."""
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    legend: list[tuple[int, str]]
    """(color, label); empty where the title already names the only line."""
    hover: str
    """JSON for the script: ``{"x": [px], "step": [...], "series": [[label, color, values]]}``."""


class _Scale:
    """Linear map from data to pixels; what lies outside is put on the edge."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high
        self._start, self._factor = start, (end - start) / (high - low)

    def __call__(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        return round(self._start + (clipped - self.low) * self._factor, 2)


def plot(chart: Chart) -> Plot:
    """Lay out a chart with at least one point."""
    steps = sorted({step for series in chart.series for step in series.steps})
    tops = _stack_tops(chart.series) if chart.stacked else []
    low, high = _widened(*(chart.limits or _value_range(chart, tops)))
    x = _Scale(*_widened(steps[0], steps[-1]), LEFT, WIDTH - RIGHT)
    y_tick_values = _ticks(low, high, 4, outward=chart.limits is None)
    y = _Scale(min(low, y_tick_values[0]), max(high, y_tick_values[-1]), HEIGHT - BOTTOM, TOP)
    colors = _colors(chart.series)
    shapes, dots = (
        (_layers(chart.series, tops, colors, x, y), [])
        if chart.stacked
        else _lines(chart.series, colors, x, y)
    )
    return Plot(
        title=chart.title,
        unit=chart.unit,
        shapes=shapes,
        dots=dots,
        x_ticks=[(x(v), number(v)) for v in _ticks(steps[0], steps[-1], 5, whole=True)],
        y_ticks=[(y(v), number(v)) for v in y_tick_values],
        legend=[(color, item.label) for color, item in zip(colors, chart.series, strict=True)]
        if chart.stacked or len(chart.series) > 1
        else [],
        hover=_hover(chart.series, colors, steps, x),
    )


def number(value: float) -> str:
    """Short text of a number: ``0.25``, ``1,250``, ``2.1e-06``."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.2g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _lines(
    items: Sequence[Series], colors: Sequence[int], x: _Scale, y: _Scale
) -> tuple[list[Shape], list[tuple[int, float, float]]]:
    shapes: list[Shape] = []
    dots: list[tuple[int, float, float]] = []
    for color, item in zip(colors, items, strict=True):
        points = [(x(s), y(v)) for s, v in zip(item.steps, item.values, strict=True)]
        if item.low is not None and item.high is not None:
            upper = [(x(s), y(v)) for s, v in zip(item.steps, item.high, strict=True)]
            lower = [(x(s), y(v)) for s, v in zip(item.steps, item.low, strict=True)]
            shapes.append(Shape(kind="band", color=color, d=_area(upper, lower)))
        shapes.append(Shape(kind="line", color=color, d=_path(points)))
        if item.sparse or len(points) == 1:
            dots += [(color, px, py) for px, py in points]
    return shapes, dots


def _layers(
    items: Sequence[Series],
    tops: Sequence[Sequence[float]],
    colors: Sequence[int],
    x: _Scale,
    y: _Scale,
) -> list[Shape]:
    shapes = []
    below: Sequence[float] = [0.0] * len(items[0].steps)
    for color, item, top in zip(colors, items, tops, strict=True):
        xs = [x(step) for step in item.steps]
        if len(xs) == 1:  # a single step still deserves a visible bar
            xs = [xs[0] - 12, xs[0] + 12]
            below, top = [*below, *below], [*top, *top]
        upper = [(px, y(v)) for px, v in zip(xs, top, strict=True)]
        lower = [(px, y(v)) for px, v in zip(xs, below, strict=True)]
        shapes.append(Shape(kind="layer", color=color, d=_area(upper, lower)))
        below = top[: len(item.steps)]
    return shapes


def _stack_tops(items: Sequence[Series]) -> list[list[float]]:
    tops: list[list[float]] = []
    below = [0.0] * len(items[0].steps)
    for item in items:
        below = [b + v for b, v in zip(below, item.values, strict=True)]
        tops.append(below)
    return tops


def _widened(low: float, high: float) -> tuple[float, float]:
    """Give a range without extent, up to rounding, one, so that it has a middle."""
    size = max(abs(low), abs(high))
    if high - low > 1e-9 * size and size > 1e-100:
        return low, high
    return (low - size * 0.5, high + size * 0.5) if size > 1e-100 else (0.0, 1.0)


def _value_range(chart: Chart, tops: Sequence[Sequence[float]]) -> tuple[float, float]:
    if chart.stacked:
        return 0.0, max(max(top) for top in tops) or 1.0
    values = [
        value
        for item in chart.series
        for column in (item.values, item.low, item.high)
        for value in column or ()
    ]
    return min(values), max(values)


def _colors(items: Sequence[Series]) -> list[int]:
    return [OTHER_COLOR if item.label == OTHER else i for i, item in enumerate(items)]


def _hover(
    items: Sequence[Series], colors: Sequence[int], steps: Sequence[float], x: _Scale
) -> str:
    series = []
    for color, item in zip(colors, items, strict=True):
        known = dict(zip(item.steps, item.values, strict=True))
        values = [number(known[step]) if step in known else None for step in steps]
        series.append([item.label, color, values])
    return json.dumps(
        {"x": [x(step) for step in steps], "step": [number(s) for s in steps], "series": series},
        separators=(",", ":"),
    )


def _ticks(
    low: float, high: float, count: int, *, whole: bool = False, outward: bool = False
) -> list[float]:
    """Round values inside the range; with ``outward`` one more on each side, to enclose it."""
    if high <= low:  # a single step
        return [low]
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    if whole:
        step = max(round(step), 1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if outward:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)] or [low]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:g},{py:g}" for px, py in points)


def _area(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    return _path([*upper, *reversed(lower)]) + "Z"
