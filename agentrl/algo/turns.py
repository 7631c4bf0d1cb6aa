"""Credit by turn without a critic: one advantage for all tokens of a turn.

A baseline at turn ``k`` may depend on anything but the action at turn ``k`` and what follows from
it. How many turns a member has follows from its actions, so subtracting, for each of a member's
*own* turns, a mean reward of that turn index is biased: it taxes the decision to go on. The
baselines here are returns-to-go of the *other* members.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo import ragged
from agentrl.algo.credit import Credit, CreditBatch, estimator
from agentrl.algo.group_baselines import (
    EQUAL_TOLERANCE,
    STD_EPSILON,
    GroupStatistics,
    group_statistics,
)
from agentrl.algo.placement import last_turns, turn_payments


@estimator(min_group=2, unbiased=({}, {"pad_stopped": False}))
def turn_return(
    batch: CreditBatch,
    *,
    gamma: float = 1.0,
    pad_stopped: bool = True,
    normalize_std: bool = False,
) -> Credit:
    """Return-to-go of the turn, less the mean of the others' at the same turn index.

    ``A[i, k] = G[i, k] - mean over j != i of G[j, k]``, ``G[k] = r[k] + gamma * G[k + 1]``.
    Unbiased with gamma = 1 and without ``normalize_std``.

    Args:
        pad_stopped: members that stopped before turn ``k`` count as 0. Without, they are left out,
            and a turn that no other member reached gets the mean of the others' whole returns less
            what was earned before it (its advantage is then RLOO's): unbiased as well, and of less
            variance where lengths differ more than rewards do.
        normalize_std: divide a group's advantages by their root mean square over its turns.
    """
    paid = turn_payments(batch)
    to_go = ragged.discounted_to_go(paid, batch.turns_per_session, gamma)
    before = ragged.cumulative_sum(paid, batch.turns_per_session) - paid
    advantages = _compared(batch, to_go, None if pad_stopped else before)
    return Credit(batch.spread_turns(_normalized(batch, advantages, normalize_std)))


@estimator(min_group=2, unbiased=({"gamma": 1.0}, {"gamma": 1.0, "pad_stopped": True}))
def discounted_outcome(
    batch: CreditBatch,
    *,
    gamma: float = 0.9,
    pad_stopped: bool = False,
    normalize_std: bool = False,
) -> Credit:
    """The whole return, discounted by the turns left until the end, less that of the others.

    ``G[i, k] = gamma**(K_i - 1 - k) * R_i``: later turns get more of what the session earned
    (the turn discount of arXiv 2505.24298). Baseline and arguments as in :func:`turn_return`; the
    baseline adds no bias with any gamma, the discount does unless it is 1.
    """
    sessions, last = last_turns(batch)
    earned = torch.zeros(len(batch.tokens_per_turn), dtype=torch.float64)
    earned[last] = batch.returns[sessions]
    to_go = ragged.discounted_to_go(earned, batch.turns_per_session, gamma)
    advantages = _compared(batch, to_go, None if pad_stopped else torch.zeros_like(to_go))
    return Credit(batch.spread_turns(_normalized(batch, advantages, normalize_std)))


@estimator(needs=("anchors",), min_group=2)
def gigpo(
    batch: CreditBatch,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize_std: bool = True,
) -> Credit:
    """Episode advantage plus step advantage (GiGPO, arXiv 2505.10978).

    ``(R - mean) / F`` over the group, plus ``step_weight * (Q - mean) / F`` over the turns of the
    group that start from the same state, ``Q[k] = r[k] + gamma * Q[k + 1]``. Means and deviations
    of episodes count every session once, not once per turn. A state seen once, a turn without an
    anchor, and a session alone in its group have no step advantage.

    Args:
        normalize_std: F is the standard deviation, plus 1e-6; else 1.
    """
    returns = batch.returns
    stats = group_statistics(returns, batch.group)
    episode = _scaled(returns, stats, normalize_std)
    to_go = ragged.discounted_to_go(turn_payments(batch), batch.turns_per_session, gamma)
    anchors = batch.require("anchors")
    known = (anchors >= 0) & (stats.size > 1)[batch.session_of_turn]
    group = stats.index[batch.session_of_turn[known]]
    states = anchors[known].unique(return_inverse=True)[1]
    num_states = int(states.max()) + 1 if len(states) else 0
    step = torch.zeros_like(to_go)
    step[known] = _scaled(
        to_go[known], group_statistics(to_go[known], group * num_states + states), normalize_std
    )
    by_turn = ragged.spread(episode, batch.turns_per_session) + step_weight * step
    return Credit(batch.spread_turns(by_turn))


def _scaled(values: Tensor, stats: GroupStatistics, normalize_std: bool) -> Tensor:
    centred = stats.centred(values)
    return centred / (stats.std + STD_EPSILON) if normalize_std else centred


def _compared(batch: CreditBatch, to_go: Tensor, before: Tensor | None) -> Tensor:
    """``to_go``, float64 [K], less the leave-one-out mean of its turn index: float64 [K].

    Exactly 0 in groups of one, and where members do not differ.

    Args:
        before: float64 [K], earned before each turn and not in ``to_go``: leave out members that
            stopped earlier. None: they count as 0.
    """
    stats = group_statistics(batch.returns, batch.group)
    group = stats.index[batch.session_of_turn]
    members = stats.size[batch.session_of_turn]
    longest = torch.zeros(stats.num_groups, dtype=torch.int64).scatter_reduce(
        0, stats.index, batch.turns_per_session, "amax"
    )
    slot = ragged.starts_of(longest)[group] + ragged.position_in_segment(batch.turns_per_session)
    reached = torch.bincount(slot, minlength=int(longest.sum()))[slot].double()
    if before is None:
        return _leave_one_out(to_go, slot, members, padded=reached < members)
    others = (stats.size * stats.mean - batch.returns) / (stats.size - 1).clamp(min=1)
    baseline = others[batch.session_of_turn] - before
    alone = to_go - baseline
    tolerance = EQUAL_TOLERANCE * baseline.abs().clamp(min=1.0)
    alone = torch.where((alone.abs() > tolerance) & (members > 1), alone, 0.0)
    compared = _leave_one_out(to_go, slot, reached, padded=torch.zeros_like(reached).bool())
    return torch.where(reached > 1, compared, alone)


def _normalized(batch: CreditBatch, advantages: Tensor, normalize_std: bool) -> Tensor:
    """Divide by the root mean square of the group's turns, where asked to; float64 [K]."""
    if not normalize_std:
        return advantages
    labels, index = batch.group.unique(return_inverse=True)
    group = index[batch.session_of_turn]
    zeros = torch.zeros(len(labels), dtype=torch.float64)
    turns = zeros.index_add(0, group, torch.ones_like(advantages)).clamp(min=1)
    mean_square = zeros.index_add(0, group, advantages.square()) / turns
    return advantages / (mean_square.sqrt() + STD_EPSILON)[group]


def _leave_one_out(values: Tensor, slot: Tensor, count: Tensor, padded: Tensor) -> Tensor:
    """``values`` less the mean of the others in the slot: float64 [K].

    Args:
        slot: int64 [K].
        count: float64 [K], members of the slot.
        padded: bool [K], some of the members are not in ``values`` and count as 0.
    """
    num_slots = int(slot.max()) + 1 if len(slot) else 0
    zeros = torch.zeros(num_slots, dtype=torch.float64)
    total = zeros.index_add(0, slot, values)[slot]
    infinite = torch.full_like(zeros, torch.inf)
    highest = (-infinite).scatter_reduce(0, slot, values, "amax")[slot]
    lowest = infinite.scatter_reduce(0, slot, values, "amin")[slot]
    highest = torch.where(padded, highest.clamp(min=0.0), highest)
    lowest = torch.where(padded, lowest.clamp(max=0.0), lowest)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    differs = (highest - lowest > EQUAL_TOLERANCE * scale) & (count > 1)
    others = (total - values) / (count - 1).clamp(min=1)
    return torch.where(differs, values - others, 0.0)
