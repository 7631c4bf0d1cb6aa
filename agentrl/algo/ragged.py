"""Arithmetic on ragged data: segments of different length, packed one after another.

A segment is a run of consecutive elements; ``lengths``, int64 [P], says how long each of them is,
0 included. Everything is vectorised over the elements, in float64, and does nothing per segment in
Python: a million tokens take milliseconds on one core.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 32
"""Elements that a scan walks through one by one, all blocks at once."""
WHITEN_EPSILON = 1e-8
"""Added to the variance."""
NOISE = 1e-12
"""Numbers that differ by less than this, relative to the largest, are the same number."""


def starts_of(lengths: Tensor) -> Tensor:
    """First element of every segment, int64 [P]; of an empty one, where it would be."""
    return lengths.cumsum(0) - lengths


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum every segment of ``values``, float [N]: float64 [P], 0 where it is empty.

    A sum depends on its own segment alone, to the last bit.
    """
    if not len(values):
        return torch.zeros(len(lengths), dtype=torch.float64)
    return torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True, initial=0)


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """Give every element the value of its segment: [P] -> [N], dtype kept.

    NumPy's repeat: torch's builds an index of N first, at three times the cost.
    """
    return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))


def count_up(first: Tensor, lengths: Tensor) -> Tensor:
    """``first[p], first[p] + 1, ...`` in every segment: int64 [N]."""
    filled = lengths > 0
    first, lengths = first[filled], lengths[filled]
    steps = torch.ones(int(lengths.sum()), dtype=torch.int64)
    if len(first):
        steps[0] = first[0]
        steps[starts_of(lengths)[1:]] = first[1:] - (first + lengths - 1)[:-1]
    return steps.cumsum_(0)


def position_in_segment(lengths: Tensor) -> Tensor:
    """Position of every element within its segment, int64 [N]."""
    return count_up(torch.zeros_like(lengths), lengths)


def last_elements(lengths: Tensor) -> Tensor:
    """Index of the last element of every segment that has one, int64."""
    return (lengths.cumsum(0) - 1)[lengths > 0]


def discounted_to_go(values: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """``y[t] = values[t] + discount * y[t + 1]`` within every segment: float64 [N].

    Blocks of :data:`BLOCK` elements are scanned side by side as if nothing came after them; what
    the following block starts with is then added, multiplied by the discounts up to it. Those
    starts are a scan themselves, :data:`BLOCK` times shorter. A discount of 0 ends a segment.
    """
    if not len(values):
        return values.double()
    sums = _columns(values)
    factors = torch.full_like(sums, float(discount))
    last = last_elements(lengths)
    factors[last % BLOCK, last // BLOCK] = 0.0
    _scan(sums, factors)
    return sums.t().reshape(-1)[: len(values)]


def cumulative_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """``y[t] = y[t - 1] + values[t]`` within every segment: float64 [N]."""
    running = values.double().cumsum(0)
    begin = starts_of(lengths)
    before = running.new_zeros(len(lengths))
    before[begin > 0] = running[begin[begin > 0] - 1]
    return running.sub_(spread(before, lengths))


def _scan(sums: Tensor, factors: Tensor) -> None:
    """Scan columns, float64 [BLOCK, C], from the last element of the last one upwards; in place.

    ``factors`` becomes, for every element, the product of factors from it to the end of its column.
    """
    for row in range(BLOCK - 2, -1, -1):
        torch.addcmul(sums[row], factors[row], sums[row + 1], out=sums[row])
        torch.mul(factors[row], factors[row + 1], out=factors[row])
    num_columns = sums.shape[1]
    if num_columns > 1:
        heads, head_factors = _columns(sums[0]), _columns(factors[0])
        _scan(heads, head_factors)
        carry = torch.zeros_like(sums[0])
        carry[:-1] = heads.t().reshape(-1)[1:num_columns]
        sums.addcmul_(factors, carry)


def _columns(values: Tensor) -> Tensor:
    """Lay consecutive blocks out as columns, float64 [BLOCK, C], zeros behind the end."""
    num_whole, num_rest = divmod(len(values), BLOCK)
    columns = torch.empty(BLOCK, num_whole + (num_rest > 0), dtype=torch.float64)
    columns[:, :num_whole] = values[: num_whole * BLOCK].view(num_whole, BLOCK).t()
    if num_rest:
        columns[num_rest:, num_whole] = 0.0
        columns[:num_rest, num_whole] = values[num_whole * BLOCK :]
    return columns


def whiten(values: Tensor) -> Tensor:
    """Shift and scale to mean 0 and (Bessel-corrected) variance 1: float64 [N].

    Equal values, and a single one, give exactly 0.
    """
    values = values.double()
    if len(values) < 2:
        return torch.zeros_like(values)
    lowest, highest = (float(bound) for bound in values.aminmax())
    if highest - lowest <= NOISE * max(abs(lowest), abs(highest)):
        return torch.zeros_like(values)
    centred = values - values.mean()
    variance = centred.dot(centred) / (len(values) - 1)
    return centred.mul_(torch.rsqrt(variance + WHITEN_EPSILON))
