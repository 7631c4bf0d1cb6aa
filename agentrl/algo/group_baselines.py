"""Outcome estimators: what a session earned, compared with the others of its group.

Every token of a session gets the same advantage. Groups whose members earned the same, and groups
of one, give exactly 0: neither float noise nor the raw reward of a lone session becomes a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.credit import Credit, CreditBatch, estimator
from agentrl.algo.ragged import segment_sum, whiten

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


@estimator(min_group=2, unbiased=({},))
def rloo(batch: CreditBatch) -> Credit:
    """``R`` minus the mean of the *other* members (arXiv 2402.14740): unbiased."""
    returns = batch.returns
    stats = group_statistics(returns, batch.group)
    scale = stats.size / (stats.size - 1).clamp(min=1)
    return Credit(batch.spread_sessions(scale * stats.centred(returns)))


@estimator(min_group=2)
def reinforce_plus_plus_baseline(batch: CreditBatch) -> Credit:
    """``whiten(R - mean)``: centred by group, scaled over all tokens (arXiv 2501.03262)."""
    returns = batch.returns
    centred = group_statistics(returns, batch.group).centred(returns)
    return Credit(whiten(batch.spread_sessions(centred)))


@estimator(min_group=2)
def opo(batch: CreditBatch) -> Credit:
    """``R`` minus the mean of the group weighted by sampled tokens (arXiv 2505.23585).

    The baseline of least variance where gradients of tokens are independent and alike in size.
    Members without a token have no weight; a group without any gives 0.
    """
    returns, length = batch.returns, batch.tokens_per_session.double()
    stats = group_statistics(returns, batch.group)
    zeros = returns.new_zeros(stats.num_groups)
    weighted = zeros.index_add(0, stats.index, length * returns)
    baseline = weighted / zeros.index_add(0, stats.index, length).clamp(min=1.0)
    centred = torch.where(stats.has_signal, returns - baseline[stats.index], 0.0)
    return Credit(batch.spread_sessions(centred))


@estimator(min_group=2)
def grpo_passk(batch: CreditBatch, *, normalize_std: bool = True) -> Credit:
    """What the best member of a group adds to pass@k: best minus second best, others 0.

    With ``normalize_std`` divided by ``std + 1e-6`` of the group (arXiv 2503.19595).
    """
    returns = batch.returns
    stats = group_statistics(returns, batch.group)
    order = _sort_within_groups(returns, stats.index)
    ranked, group = returns[order], stats.index[order]
    is_best = torch.ones(len(order), dtype=torch.bool)
    is_best[:-1] = group[1:] != group[:-1]
    best = is_best & stats.has_signal[order]
    lead = torch.zeros_like(returns)
    lead[order[best]] = (ranked - ranked.roll(1))[best]
    if normalize_std:
        lead = lead / (stats.std + STD_EPSILON)
    return Credit(batch.spread_sessions(lead))


@estimator(min_group=2)
def gpg(batch: CreditBatch) -> Credit:
    """``alpha * (R - mean)``, with alpha = sessions / sessions with ``R != 0`` (arXiv 2504.02546).

    Alpha makes up for sessions without signal. Where all rewards are 0, so are all advantages.
    """
    returns = batch.returns
    alpha = len(returns) / max(int(torch.count_nonzero(returns)), 1)
    centred = group_statistics(returns, batch.group).centred(returns)
    return Credit(batch.spread_sessions(alpha * centred))


@estimator(min_group=2)
def gdpo(batch: CreditBatch, *, normalize_std: bool = True) -> Credit:
    """Every named reward normalised in its group by itself, added by weight, whitened over tokens.

    ``whiten(sum_k w_k * GRPO(R_k))`` (arXiv 2601.05242): no reward drowns another one by its scale.
    Weights come from ``named_weights``: a scale of the reward itself cancels in the division.
    Token penalties have no group of their own; their sum is centred by group and added.

    Raises:
        ValueError: the batch names no rewards.
    """
    if not batch.named_rewards:
        raise ValueError("gdpo normalises every named reward by itself, and the batch names none")
    total = torch.zeros(batch.num_sessions, dtype=torch.float64)
    for name, rewards in batch.named_rewards.items():
        stats = group_statistics(rewards, batch.group)
        scaled = stats.centred(rewards)
        if normalize_std:
            weight = batch.named_weights.get(name)
            scaled = scaled / (stats.std + STD_EPSILON)
            scaled = scaled if weight is None else scaled * weight.abs()
        total += scaled
    if batch.token_penalties is not None:
        penalties = segment_sum(batch.token_penalties, batch.tokens_per_session)
        total += group_statistics(penalties, batch.group).centred(penalties)
    return Credit(whiten(batch.spread_sessions(total)))


@dataclass(slots=True, frozen=True, kw_only=True)
class GroupStatistics:
    """Per-session statistics of the group each session belongs to; all tensors [S]."""

    num_groups: int
    index: Tensor
    """int64: which of the groups."""
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
        num_groups=len(labels),
        index=index,
        size=size[index],
        mean=mean[index],
        std=variance.sqrt()[index],
        has_signal=(differs & (size > 1))[index],
    )


def _sort_within_groups(values: Tensor, index: Tensor) -> Tensor:
    """Return positions ordered by group, then by value; int64 [S]."""
    order = values.argsort(stable=True)
    return order[index[order].argsort(stable=True)]
