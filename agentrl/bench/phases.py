"""Whose time it was: every moment of a step has one owner.

Work overlaps: engines generate while a tool runs elsewhere, or while the optimizer works. A moment
belongs to the first of :data:`PHASES` that was going on; ``wait`` is a moment in which the loop
waited for episodes and none of them generated, ran a tool or was graded. What is left has nobody to
own it (``other``): a report with more than 2 % of that says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl.telemetry.meter import Meter
from agentrl.types import Trajectory

PHASES = ("logp", "update", "sync", "sleep", "gen", "tool", "reward", "driver", "wait")
OTHER = "other"
MAX_OTHER = 0.02
"""Share of a step that may have no owner."""
_DRIVER = ("credit", "mismatch", "record", "compute", "describe", "eval")


@dataclass(slots=True, frozen=True)
class Interval:
    """Something that went on from ``start`` to ``end``, seconds on the monotonic clock."""

    phase: str
    start: float
    end: float


class IntervalMeter(Meter):
    """A meter that also keeps when its spans began and ended, and when steps did."""

    def __init__(self) -> None:
        super().__init__(clock=time.perf_counter)
        self.intervals: list[Interval] = []
        self.steps: list[tuple[float, float]] = []

    @contextmanager
    def step(self, step: int) -> Iterator[dict[str, float]]:
        """See :meth:`Meter.step`."""
        start = time.perf_counter()
        with super().step(step) as metrics:
            yield metrics
        self.steps.append((start, time.perf_counter()))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """See :meth:`Meter.span`."""
        start = time.perf_counter()
        try:
            with super().span(name):
                yield
        finally:
            self.intervals.append(Interval(phase_of(name), start, time.perf_counter()))


def phase_of(span: str) -> str:
    """Return the phase of a span of the trainer's loop."""
    named = {"collect": "wait", "logprob": "logp", "wake": "sleep"}
    return "driver" if span in _DRIVER else named.get(span, span)


def of_trajectory(trajectory: Trajectory) -> Iterator[Interval]:
    """Yield what went on in an episode that was played on this machine."""
    began = trajectory.timings_s.get("began")
    if began is None:  # it never came to play
        return
    total = began + trajectory.timings_s["total"]
    reset_s = trajectory.timings_s.get("env", 0.0)
    last = began
    for turn in trajectory.turns:
        if turn.inherited:
            continue
        spent = turn.timings_s
        start = began + spent["start"]
        said = start + spent["generate"]
        last = said + spent.get("tools", 0.0) + spent.get("env", 0.0)
        reset_s -= spent.get("env", 0.0)
        yield Interval("gen", start, said)
        yield Interval("tool", said, last)
    yield Interval("tool", began, began + max(reset_s, 0.0))
    yield Interval("reward", last, min(last + trajectory.timings_s.get("reward", 0.0), total))


def shares(
    intervals: Iterable[Interval], start: float, end: float, phases: Sequence[str] = PHASES
) -> dict[str, float]:
    """Return the seconds of every phase between ``start`` and ``end``; they add up to the whole.

    Of phases that overlap the first of ``phases`` gets the moment.
    """
    rank = {phase: number for number, phase in enumerate(phases)}
    edges: list[tuple[float, int, int]] = []
    for interval in intervals:
        low, high = max(interval.start, start), min(interval.end, end)
        if low < high:
            number = rank[interval.phase]
            edges += [(low, 1, number), (high, -1, number)]
    edges.sort()
    going = [0] * len(phases)
    seconds = dict.fromkeys([*phases, OTHER], 0.0)
    at = start
    for when, change, number in [*edges, (end, 0, 0)]:
        owner = next((phase for phase, count in zip(phases, going, strict=True) if count), OTHER)
        seconds[owner] += when - at
        going[number] += change
        at = when
    return seconds
