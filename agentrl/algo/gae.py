"""Generalised advantage estimation (arXiv 1506.02438): by token, by turn, and by both.

Only sampled tokens are there, so the value after a token is that of the next *sampled* one, also
where an observation stands between them, and a running return never stops at an observation.
A terminated session is worth 0 after its last token; a truncated one is worth what the critic
says of the state it stopped in (``bootstrap_values``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo import ragged
from agentrl.algo.credit import Credit, CreditBatch, estimator
from agentrl.algo.placement import paying_turns, token_payments, turn_payments


@estimator(needs=("values",), unbiased=({"whiten": False},))
def gae(batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> Credit:
    """``A[t] = delta[t] + gamma * lam * A[t + 1]``, ``delta = r + gamma * V' - V``, by token.

    Value targets are ``A + V``, before whitening. Unbiased with gamma = lam = 1, not whitened.

    Args:
        whiten: bring advantages of the batch to mean 0 and variance 1.
    """
    values = batch.require("values").double()
    lengths = batch.tokens_per_session
    advantages = _advantages(
        token_payments(batch), values, lengths, _bootstrap(batch), gamma=gamma, lam=lam
    )
    return Credit(
        ragged.whiten(advantages) if whiten else advantages, value_targets=advantages + values
    )


@estimator(needs=("values",), unbiased=({"gamma": 1.0, "lam": 1.0, "whiten": False},))
def turn_gae(
    batch: CreditBatch, *, gamma: float = 0.99, lam: float = 0.9, whiten: bool = True
) -> Credit:
    """GAE over turns as one step each (Turn-PPO, arXiv 2512.17008).

    The critic is read, and trained, at the first token of a turn: the state in which the turn was
    begun. All tokens of the turn share its advantage. A turn without tokens is no decision; what
    it paid goes to the turn before. Unbiased with gamma = lam = 1, not whitened.

    Args:
        whiten: bring advantages of the batch to mean 0 and variance 1, each token counted once.
    """
    decided, lengths = _decided_turns(batch)
    first = ragged.starts_of(batch.tokens_per_turn)[decided]
    values = batch.require("values")[first].double()
    advantages = _advantages(
        _paid_by_turn(batch)[decided], values, lengths, _bootstrap(batch), gamma=gamma, lam=lam
    )
    tokens_per_turn = batch.tokens_per_turn[decided]
    spread = ragged.spread(advantages, tokens_per_turn)
    targets = ragged.spread(advantages + values, tokens_per_turn)
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[first] = True
    return Credit(
        ragged.whiten(spread) if whiten else spread, value_targets=targets, value_mask=mask
    )


@estimator(needs=("values",), unbiased=({"gamma": 1.0, "lam": 1.0, "whiten": False},))
def bilevel_gae(
    batch: CreditBatch,
    *,
    gamma: float = 0.95,
    lam: float = 1.0,
    token_gamma: float = 1.0,
    token_lam: float = 1.0,
    whiten: bool = True,
) -> Credit:
    """GAE over turns, then over the tokens of each turn (Bi-Level GAE, arXiv 2510.16907).

    The advantage of a turn (``gamma``, ``lam``) stands on its last token; the recursion over the
    tokens before it (``token_gamma``, ``token_lam``) starts from there and never leaves the turn.
    Turns read the critic at their *last* token. Read at the first, the baseline of a token would
    hold ``V(first) - V(last)``, and the state at the last token follows from the tokens before it:
    that is biased wherever the critic errs. Unbiased with all four at 1, not whitened.

    Args:
        whiten: bring advantages of the batch to mean 0 and variance 1.
    """
    values = batch.require("values").double()
    decided, lengths = _decided_turns(batch)
    tokens_per_turn = batch.tokens_per_turn[decided]
    last = tokens_per_turn.cumsum(0) - 1
    increments = torch.zeros_like(values)
    if batch.token_penalties is not None:
        increments.copy_(batch.token_penalties)
    paid = _paid_between_last_tokens(batch, decided, lengths, increments[last])
    by_turn = _advantages(paid, values[last], lengths, _bootstrap(batch), gamma=gamma, lam=lam)
    increments[:-1] += token_gamma * values[1:]
    increments -= values
    increments[last] = by_turn
    advantages = ragged.discounted_to_go(increments, tokens_per_turn, token_gamma * token_lam)
    return Credit(
        ragged.whiten(advantages) if whiten else advantages, value_targets=advantages + values
    )


def _advantages(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    bootstrap: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return the advantages of steps, float64 [N], in sessions of ``lengths``, int64 [S].

    Args:
        rewards: float64 [N]; overwritten.
        values: float64 [N], of the state before each step.
        bootstrap: float64 [S], value of the state after the last step.
    """
    last = ragged.last_elements(lengths)
    following = torch.empty_like(values)
    following[:-1] = values[1:]
    following[last] = bootstrap[lengths > 0]
    increments = rewards.add_(following, alpha=gamma).sub_(values)
    return ragged.discounted_to_go(increments, lengths, gamma * lam)


def _bootstrap(batch: CreditBatch) -> Tensor:
    """Value after the last token of every session, float64 [S]: 0 where it terminated."""
    if not bool(batch.truncated.any()):
        return torch.zeros(batch.num_sessions, dtype=torch.float64)
    after = batch.require("bootstrap_values").double()
    return torch.where(batch.truncated, after, 0.0)


def _decided_turns(batch: CreditBatch) -> tuple[Tensor, Tensor]:
    """Mask of the turns that have tokens, bool [K], and how many each session has, int64 [S]."""
    decided = batch.tokens_per_turn > 0
    counts = torch.zeros_like(batch.turns_per_session)
    return decided, counts.index_add_(0, batch.session_of_turn, decided.long())


def _paid_by_turn(batch: CreditBatch, *, penalties: bool = True) -> Tensor:
    """What turns earned, with what the empty turns after them did; float64 [K]."""
    paid, payer = turn_payments(batch, penalties=penalties), paying_turns(batch)
    falls = payer >= 0
    return torch.zeros_like(paid).index_add_(0, payer[falls], paid[falls])


def _paid_between_last_tokens(
    batch: CreditBatch, decided: Tensor, lengths: Tensor, penalty_of_last: Tensor
) -> Tensor:
    """What was earned from the last token of each decided turn to that of the next one.

    Tokens of the next turn before its last belong to the step that leads to it.
    """
    paid = _paid_by_turn(batch, penalties=False)[decided] + penalty_of_last
    if batch.token_penalties is None:
        return paid
    of_turn = ragged.segment_sum(batch.token_penalties, batch.tokens_per_turn)[decided]
    inner = of_turn - penalty_of_last
    following = torch.zeros_like(paid)
    following[:-1] = inner[1:]
    following[ragged.last_elements(lengths)] = 0.0
    return paid + following
