"""Reward-to-go by token, less a baseline that needs no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo import ragged
from agentrl.algo.credit import Credit, CreditBatch, estimator
from agentrl.algo.group_baselines import EQUAL_TOLERANCE, group_statistics
from agentrl.algo.placement import token_payments

OTB_EPSILON = 1e-8
"""Weight that the plain mean keeps in the optimal baseline, where all others vanish."""


@estimator()
def reinforce_plus_plus(batch: CreditBatch, *, gamma: float = 1.0) -> Credit:
    """``whiten(G)`` over all tokens, ``G[t] = r[t] + gamma * G[t + 1]`` (arXiv 2501.03262)."""
    return Credit(ragged.whiten(_to_go(batch, gamma)))


@estimator(needs=("greedy_rewards",), unbiased=({},))
def remax(batch: CreditBatch) -> Credit:
    """Reward-to-go less the return of the prompt's greedy episode (arXiv 2310.10505)."""
    return Credit(_to_go(batch, 1.0) - batch.spread_sessions(batch.require("greedy_rewards")))


@estimator(needs=("old_logprobs", "sum_pi_squared"), min_group=2)
def optimal_token_baseline(batch: CreditBatch, *, handle_zero_tail: bool = True) -> Credit:
    """Reward-to-go less a baseline per position that weighs members by their gradient's energy.

    ``B[t] = sum_i G[i, t] * W[i, t] / sum_i W[i, t]`` over the members that reached position
    ``t``; ``W[t] = sum_{j <= t} (1 - 2 * pi[j] + sum pi[j]**2)``, each term times the squared
    importance weight where there is one. Where all weights vanish (a policy sure of itself) it is
    the plain mean. Positions count sampled tokens only, so observations shift nothing: the
    single-turn and the multi-turn form are one function here.

    Args:
        handle_zero_tail: positions that only the longest member reached get no baseline, instead
            of their own return; in a group without a difference in reward they still give 0.
    """
    to_go, energy = _to_go(batch, 1.0), _cumulative_energy(batch).add_(OTB_EPSILON)
    lengths = batch.tokens_per_session
    stats = group_statistics(batch.returns, batch.group)
    longest, second_longest = _two_longest(lengths, stats.index, stats.num_groups)
    slot = ragged.count_up(ragged.starts_of(longest)[stats.index], lengths)
    zeros = torch.zeros(int(longest.sum()), dtype=torch.float64)
    weight = zeros.index_add(0, slot, energy)
    weighted = zeros.index_add_(0, slot, energy.mul_(to_go))
    baseline = torch.index_select(weighted.div_(weight), 0, slot, out=energy)
    advantages = to_go - baseline
    advantages.masked_fill_(torch.abs(advantages, out=baseline) <= EQUAL_TOLERANCE, 0.0)
    if handle_zero_tail:
        reach = torch.where(stats.has_signal, second_longest[stats.index], lengths)
        _restore_tails(advantages, to_go, lengths, reach)
    return Credit(advantages)


def _to_go(batch: CreditBatch, gamma: float) -> Tensor:
    return ragged.discounted_to_go(token_payments(batch), batch.tokens_per_session, gamma)


def _cumulative_energy(batch: CreditBatch) -> Tensor:
    """Sum of squared gradients with respect to the logits, up to every token; float64 [M]."""
    energy = batch.require("old_logprobs").double().exp_().mul_(-2.0).add_(1.0)
    energy += batch.require("sum_pi_squared")
    if batch.is_weights is not None:
        energy *= batch.is_weights.double().square_()
    return ragged.cumulative_sum(energy, batch.tokens_per_session)


def _two_longest(lengths: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Tokens of the longest and the second longest member of every group; 0 where there is none."""
    order = lengths.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    begin = ragged.starts_of(torch.bincount(group, minlength=num_groups))
    ranked = torch.cat([lengths[order], lengths.new_zeros(1)])
    has_second = torch.bincount(group, minlength=num_groups) > 1
    return ranked[begin], torch.where(has_second, ranked[begin + 1], 0)


def _restore_tails(advantages: Tensor, to_go: Tensor, lengths: Tensor, reach: Tensor) -> None:
    """Put the bare return where a session is past ``reach``, int64 [S] tokens; in place."""
    tails = (lengths - reach).clamp(min=0)
    tokens = ragged.count_up(ragged.starts_of(lengths) + lengths - tails, tails)
    advantages[tokens] = to_go[tokens]
