"""Advantages: what each session was worth compared with its group.

Legend: ``S`` sessions, ``N`` tokens. Rewards and group labels are [S]; sessions that failed are
left out by the caller before anything here sees them. All sums run in float64, so that a group's
result does not depend on the order of its members beyond the last bits of that format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation, as in the GRPO paper (arXiv 2402.03300)."""
EQUAL_TOLERANCE = 1e-6
"""Rewards of a group that differ by less than this, relative to their size, count as equal."""


class Estimator(Protocol):
    """An outcome estimator: one number per session."""

    def __call__(self, rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
        """Return advantages, float32 [S].

        Args:
            rewards: float [S], the return of each session.
            groups: int64 [S], equal where two sessions answer the same prompt.
            normalize_std: divide by the standard deviation (Bessel) of the group.
        """
        ...


@dataclass(slots=True, frozen=True)
class _Groups:
    """Per-session statistics of the group each session belongs to; all [S]."""

    size: Tensor
    mean: Tensor
    std: Tensor
    """Bessel-corrected; 0 for a group of one."""
    has_signal: Tensor
    """bool: the group has two members or more, and they did not all earn the same."""


def grpo(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Return ``(R - mean) / (std + 1e-6)`` within each group (arXiv 2402.03300).

    Without ``normalize_std`` it is ``R - mean`` (Dr. GRPO, arXiv 2503.20783). Groups whose members
    earned the same, and groups of one, give exactly 0: neither float noise nor the raw reward of a
    lone session becomes a gradient.
    """
    stats = _statistics(rewards, groups)
    return _finish(rewards.double() - stats.mean, stats, normalize_std)


def rloo(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Return ``R`` minus the mean of the *other* members (arXiv 2402.14740).

    Unbiased for two members or more (without ``normalize_std``). Edge cases as in :func:`grpo`.
    """
    stats = _statistics(rewards, groups)
    scale = stats.size / (stats.size - 1).clamp(min=1)
    return _finish(scale * (rewards.double() - stats.mean), stats, normalize_std)


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo}


def has_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return bool [S]: False where every estimator here gives 0 (equal rewards, group of one)."""
    return _statistics(rewards, groups).has_signal


def broadcast(advantages: Tensor, session_of_token: Tensor, loss_mask: Tensor) -> Tensor:
    """Give every trained token the advantage of its session.

    Args:
        advantages: float [S].
        session_of_token: int64 [N], index into ``advantages``.
        loss_mask: bool [N].

    Returns:
        float32 [N], 0 where the mask is False.
    """
    return torch.where(loss_mask, advantages.float()[session_of_token], 0.0)


def _statistics(rewards: Tensor, groups: Tensor) -> _Groups:
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [S]"
        )
    values = rewards.double()
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
    return _Groups(size[index], mean[index], variance.sqrt()[index], (differs & (size > 1))[index])


def _finish(centred: Tensor, stats: _Groups, normalize_std: bool) -> Tensor:
    scaled = centred / (stats.std + STD_EPSILON) if normalize_std else centred
    return torch.where(stats.has_signal, scaled, 0.0).float()
