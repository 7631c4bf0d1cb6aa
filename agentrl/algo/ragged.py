"""Arithmetic on ragged data: segments of different length, packed one after another.

A segment is a run of consecutive elements; ``lengths``, int64 [P], says how long each of them is,
0 included. Everything is vectorised over the elements, in float64, and does nothing per segment in
Python: a million tokens take milliseconds on one core.
"""

from __future__ import annotations

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


def position_in_segment(lengths: Tensor) -> Tensor:
    """Position of every element within its segment, int64 [N]."""
    begin = torch.repeat_interleave(starts_of(lengths), lengths)
    return torch.arange(len(begin)) - begin


def last_elements(lengths: Tensor) -> Tensor:
    """Index of the last element of every segment that has one, int64."""
    return (lengths.cumsum(0) - 1)[lengths > 0]


def discounted_to_go(values: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """``y[t] = values[t] + discount * y[t + 1]`` within every segment: float64 [N]."""
    decays = torch.full((len(values),), float(discount), dtype=torch.float64)
    decays[last_elements(lengths)] = 0.0
    return reverse_scan(values.double(), decays)


def cumulative_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """``y[t] = y[t - 1] + values[t]`` within every segment: float64 [N]."""
    running = values.double().cumsum(0)
    before = torch.cat([running.new_zeros(1), running])[starts_of(lengths)]
    return running - torch.repeat_interleave(before, lengths)


def reverse_scan(increments: Tensor, decays: Tensor) -> Tensor:
    """``y[t] = increments[t] + decays[t] * y[t + 1]``, and 0 after the end: float64 [N].

    A decay of 0 ends a segment. Blocks of :data:`BLOCK` elements are scanned side by side as if
    nothing came after them; what the following block starts with is then added, multiplied by the
    decays up to it. Those starts are a scan themselves, :data:`BLOCK` times shorter.
    """
    num = len(increments)
    if num == 0:
        return increments.double()
    num_blocks = -(-num // BLOCK)
    sums = _columns(increments, num_blocks)
    factors = _columns(decays, num_blocks)
    for row in range(BLOCK - 2, -1, -1):
        torch.addcmul(sums[row], factors[row], sums[row + 1], out=sums[row])
        torch.mul(factors[row], factors[row + 1], out=factors[row])
    if num_blocks > 1:
        carry = torch.zeros(num_blocks, dtype=torch.float64)
        carry[:-1] = reverse_scan(sums[0], factors[0])[1:]
        sums.addcmul_(factors, carry)
    return sums.t().reshape(-1)[:num]


def _columns(values: Tensor, num_blocks: int) -> Tensor:
    """Lay consecutive blocks out as columns, float64 [BLOCK, num_blocks], zeros behind the end."""
    columns = torch.empty(BLOCK, num_blocks, dtype=torch.float64)
    whole = len(values) // BLOCK
    columns[:, :whole] = values[: whole * BLOCK].view(whole, BLOCK).t()
    if whole < num_blocks:
        rest = values[whole * BLOCK :]
        columns[:, whole] = 0.0
        columns[: len(rest), whole] = rest
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
