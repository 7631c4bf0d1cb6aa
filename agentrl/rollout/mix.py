"""Several environments in one stream of tasks, in fixed proportions.

Which environment the ``index``-th prompt belongs to is a pure function of the index and the
weights, so a resumed run needs nothing but the index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Protocol

from agentrl.rollout.tasks import Dispatch


class TaskSource(Protocol):
    """The tasks of one environment, without end."""

    def at(self, index: int) -> Dispatch:
        """Return what comes at ``index`` (0-based)."""
        ...


class PromptStream(Protocol):
    """The prompts of a run, in an order that their position alone decides."""

    def starting_at(self, index: int) -> Iterator[Dispatch]:
        """Yield prompts without end, from ``index`` on."""
        ...


class MixSchedule:
    """Deals positions to parties, each as close to its share as whole numbers allow.

    With shares ``w`` that add up to 1, after ``t`` positions a party has had ``c`` with
    ``|c - w t| < 1``, at every ``t``; and with integer weights of sum ``W`` (after division by
    their common divisor) any ``W`` positions in a row hold every party exactly as often as its
    weight. Position ``t`` goes to the party whose next one is due first, ``(c + 1) / w``, among
    those that are not ahead, ``c < w (t + 1)`` (earliest deadline first on the windows of Baruah,
    Cohen, Plaxton and Varvel, "Proportionate progress", 1996).

    Args:
        weights: positive; taken as the decimal numbers that they are written as.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(repr(float(weight))) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*whole)
        self._weights = [weight // divisor for weight in whole]
        self.period = sum(self._weights)
        """Positions after which the pattern repeats."""
        self._position = 0
        self._counts = [0] * len(whole)

    def at(self, index: int) -> tuple[int, int]:
        """Return (party, positions that it had before ``index``).

        Reading on costs one step per position; going back, or far ahead, up to a period.
        """
        periods = index // self.period
        if not periods * self.period <= self._position <= index:
            self._position = periods * self.period
            self._counts = [periods * weight for weight in self._weights]
        while self._position < index:
            self._counts[self._next()] += 1
            self._position += 1
        party = self._next()
        return party, self._counts[party]

    def _next(self) -> int:
        t = self._position
        due = [
            # ceil((c + 1) / w): the last position at which this share is still held
            (-(-(count + 1) * self.period // weight), party)
            for party, (count, weight) in enumerate(zip(self._counts, self._weights, strict=True))
            if count * self.period < weight * (t + 1)
        ]
        return min(due)[1]


class MixedStream:
    """Deals the prompts of a run to the streams of its environments. A mix of one is that stream.

    Args:
        streams: name of the environment -> its own endless epochs.
        weights: name -> weight, above 0.
    """

    def __init__(self, streams: Mapping[str, TaskSource], weights: Mapping[str, float]) -> None:
        self._names = list(streams)
        self._streams = list(streams.values())
        self._schedule = MixSchedule([weights[name] for name in self._names])

    def at(self, index: int) -> Dispatch:
        """Return the prompt at ``index`` (0-based) of the run; its epoch is its environment's."""
        party, position = self._schedule.at(index)
        dispatch = self._streams[party].at(position)
        return replace(dispatch, index=index, env=self._names[party])

    def starting_at(self, index: int) -> Iterator[Dispatch]:
        """Yield prompts without end, from ``index`` on."""
        while True:
            yield self.at(index)
            index += 1
