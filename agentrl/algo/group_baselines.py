"""Outcome estimators: what a session earned, compared with the others of its group.

Every token of a session gets the same advantage. Groups whose members earned the same, and groups
of one, give exactly 0: neither float noise nor the raw reward of a lone session becomes a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.credit import Credit, CreditBatch, estimator

STD_EPSILON = 1e-6
"""Added to the standard deviation, as in the GRPO paper (arXiv 2402.03300)."""
EQUAL_TOLERANCE = 1e-6
"""Rewards of a group that differ by less than this, relative to their size, count as equal."""


@estimator(min_group=2)
def grpo(batch: CreditBatch, *, normalize_std: bool = True) -> Credit:
    """``(R - mean) / (std + 1e-6)`` within each group (arXiv 2402.03300).

    Without ``normalize_std`` it is ``R - mean`` (Dr. GRPO, arXiv 2503.20783).
    """
    returns = batch.returns
    stats = group_statistics(returns, batch.group)
    centred = stats.centred(returns)
    scaled = centred / (stats.std + STD_EPSILON) if normalize_std else centred
    return Credit(batch.spread_sessions(scaled))


@estimator(min_group=2)
def rloo(batch: CreditBatch) -> Credit:
    """``R`` minus the mean of the *other* members (arXiv 2402.14740): unbiased."""
    returns = batch.returns
    stats = group_statistics(returns, batch.group)
    scale = stats.size / (stats.size - 1).clamp(min=1)
    return Credit(batch.spread_sessions(scale * stats.centred(returns)))


@dataclass(slots=True, frozen=True)
class GroupStatistics:
    """Per-session statistics of the group each session belongs to; all [S]."""

    size: Tensor
    mean: Tensor
    std: Tensor
    """Bessel-corrected; 0 for a group of one."""
    has_signal: Tensor
    """bool: the group has two members or more, and they did not all earn the same."""

    def centred(self, values: Tensor) -> Tensor:
        """``values - mean``, exactly 0 in groups without signal: float64 [S]."""
        return torch.where(self.has_signal, values.double() - self.mean, 0.0)


def group_statistics(values: Tensor, groups: Tensor) -> GroupStatistics:
    """Summarise ``values``, float [S], by ``groups``, int64 [S].

    Raises:
        ValueError: shapes differ, or a value is not finite.
    """
    if values.ndim != 1 or values.shape != groups.shape:
        raise ValueError(
            f"rewards {tuple(values.shape)} and groups {tuple(groups.shape)} must both be [S]"
        )
    values = values.double()
    if not bool(values.isfinite().all()):
        raise ValueError("rewards must be finite: failed sessions are left out before this")
    labels, index = groups.unique(return_inverse=True)
    zeros = values.new_zeros(len(labels))
    size = zeros.index_add(0, index, torch.ones_like(values))
    mean = zeros.index_add(0, index, values) / size
    variance = zeros.index_add(0, index, (values - mean[index]) ** 2) / (size - 1).clamp(min=1)
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, index, values, "amax")
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(0, index, values, "amin")
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    differs = highest - lowest > EQUAL_TOLERANCE * scale
    return GroupStatistics(
        size[index], mean[index], variance.sqrt()[index], (differs & (size > 1))[index]
    )
