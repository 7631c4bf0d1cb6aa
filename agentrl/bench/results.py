"""How arms are taken in turn, compared and shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.bench.machine import BenchError

EQUAL_WORK = 0.005
"""Share by which arms may differ in what they did."""


@dataclass(slots=True)
class Arm:
    """What one way of doing the work took."""

    name: str
    seconds: list[float] = field(default_factory=list)
    """Of every repeat."""
    work: list[dict[str, float]] = field(default_factory=list)
    """What was done in every repeat: tokens, turns, bytes."""

    def add(self, seconds: float, work: Mapping[str, float]) -> None:
        """Note a repeat."""
        self.seconds.append(seconds)
        self.work.append(dict(work))

    @property
    def median_s(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.seconds)

    @property
    def range_s(self) -> tuple[float, float]:
        """Shortest and longest."""
        return min(self.seconds), max(self.seconds)

    @property
    def halves_differ(self) -> float:
        """Ratio of the medians of even and odd repeats: how far the arm is from itself."""
        if len(self.seconds) < 2:
            return 1.0
        even, odd = statistics.median(self.seconds[::2]), statistics.median(self.seconds[1::2])
        return max(even, odd) / min(even, odd)


def interleaved(names: Sequence[str], repeats: int) -> list[str]:
    """Return the order of the runs, A B B A A B B A: drift of the machine hits all alike."""
    order: list[str] = []
    for turn in range(repeats):
        order += names if turn % 2 == 0 else reversed(names)
    return order


def refuse_unequal_work(arms: Sequence[Arm]) -> None:
    """Refuse to compare arms that did not do the same.

    Raises:
        BenchError: names what differed, and by how much.
    """
    first = arms[0]
    for arm in arms[1:]:
        for repeat, (one, other) in enumerate(zip(first.work, arm.work, strict=True)):
            for what in one.keys() | other.keys():
                a, b = one.get(what, 0.0), other.get(what, 0.0)
                if abs(a - b) > EQUAL_WORK * max(a, b):
                    raise BenchError(
                        f"repeat {repeat}: {arm.name} did {b:g} {what}, {first.name} {a:g}; times "
                        "of different work cannot be compared"
                    )


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as text: the first column to the left, the others to the right."""
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
