"""Stored tables of lengths and latencies: the same long tail in every run, at any scale."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

_P99 = NormalDist().inv_cdf(0.99)


class Table:
    """Values that a number picks from: the same number, the same value.

    Args:
        values: at least one.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(values)

    def at(self, seed: int) -> float:
        """Return the value that ``seed`` (any whole number) picks."""
        return self.values[seed % len(self.values)]

    @property
    def mean(self) -> float:
        """Mean over the table."""
        return math.fsum(self.values) / len(self.values)


@cache
def lognormal(*, median: float, p99: float, size: int = 2048) -> Table:
    """Return the quantiles of a lognormal distribution, in mixed order.

    Args:
        median, p99: of the distribution; response lengths have about ten times the one in the
            other.
        size: quantiles, evenly spaced; the largest is that at ``1 - 1 / (2 size)``.
    """
    sigma = math.log(p99 / median) / _P99
    normal = NormalDist()
    values = [
        median * math.exp(sigma * normal.inv_cdf((index + 0.5) / size)) for index in range(size)
    ]
    random.Random(0).shuffle(values)
    return Table(values)


RESPONSE_TOKENS = lognormal(median=200, p99=2000)
"""Tokens of a turn: p99 is ten times the median."""
TOOL_SECONDS = lognormal(median=0.05, p99=3.0)
"""Latency of a long-tailed tool."""
