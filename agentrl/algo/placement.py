"""Where rewards fall: on which sampled token, or on which turn.

A reward belongs to the last sampled token at or before the end of the turn that earned it: tokens
after it did not cause it. A turn that ended before its first token therefore pays the turn before.
What a session earned before its first token (its first turn was empty) no token could cause: it
counts in the return of the session, and falls on no token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo.credit import CreditBatch
from agentrl.algo.ragged import segment_sum


def last_turns(batch: CreditBatch) -> tuple[Tensor, Tensor]:
    """Return the sessions that have turns, and the last turn of each; int64 both."""
    has_turns = batch.turns_per_session > 0
    return has_turns.nonzero().squeeze(1), (batch.turns_per_session.cumsum(0) - 1)[has_turns]


def turn_payments(batch: CreditBatch, *, penalties: bool = True) -> Tensor:
    """What every turn earned, float64 [K]; the last turn of a session with the outcome.

    Args:
        penalties: add the penalties of its tokens.
    """
    sessions, last = last_turns(batch)
    paid = batch.turn_rewards.double().index_add(0, last, batch.outcome_rewards[sessions].double())
    if penalties and batch.token_penalties is not None:
        paid = paid + segment_sum(batch.token_penalties, batch.tokens_per_turn)
    return paid


def paying_turns(batch: CreditBatch) -> Tensor:
    """Return the last turn with a token at or before every turn, int64 [K]; -1 for none."""
    turns = torch.arange(len(batch.tokens_per_turn))
    latest = torch.where(batch.tokens_per_turn > 0, turns, -1).cummax(0).values
    first = (batch.turns_per_session.cumsum(0) - batch.turns_per_session)[batch.session_of_turn]
    return torch.where(latest >= first, latest, -1)


def token_payments(batch: CreditBatch) -> Tensor:
    """What every token earned: its penalty, and rewards where they fall; float64 [M]."""
    paid = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if batch.token_penalties is not None:
        paid.copy_(batch.token_penalties)
    payer = paying_turns(batch)
    falls = payer >= 0
    last_token = batch.tokens_per_turn.cumsum(0) - 1
    return paid.index_add_(
        0, last_token[payer[falls]], turn_payments(batch, penalties=False)[falls]
    )
