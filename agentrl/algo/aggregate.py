"""How the losses of tokens become one number.

The loss of a mini-batch is ``sum(weight * token_loss)``. The weights are computed once over the
whole mini-batch from its final mask, then cut along with the rows: so the gradient cannot depend
on how a mini-batch is split into micro-batches or spread over ranks.

Legend: ``N`` tokens of the mini-batch. A session counts once, however many rows (segments) it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS: dict[str, str] = {
    "token-mean": "every trained token weighs the same",
    "seq-mean-token-mean": "every session weighs the same, its tokens share that",
    "seq-mean-token-sum": "tokens of a session are summed, sessions averaged",
}
"""Name -> what it means."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Denominators:
    """What a mini-batch divides by: totals over all its micro-batches and ranks."""

    num_tokens: int
    """Tokens with mask 1."""
    num_sessions: int
    """Sessions with at least one such token."""


def denominators(loss_mask: Tensor, session_of_token: Tensor) -> Denominators:
    """Count the trained tokens and the sessions that hold any.

    Args:
        loss_mask: bool [N], after every filter.
        session_of_token: int64 [N].
    """
    return Denominators(
        num_tokens=int(loss_mask.sum()),
        num_sessions=len(session_of_token[loss_mask].unique()),
    )


def token_weights(
    loss_mask: Tensor, session_of_token: Tensor, mode: str, totals: Denominators
) -> Tensor:
    """Return the weight of every token in the loss, float32 [N]; 0 where the mask is False.

    Args:
        loss_mask: bool [N].
        session_of_token: int64 [N]; all rows of a session are in this batch.
        mode: one of :data:`AGGREGATIONS`.
        totals: of the whole mini-batch, over all ranks.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
    mask = loss_mask.double()
    if mode == "token-mean":
        weights = mask / max(totals.num_tokens, 1)
    elif mode == "seq-mean-token-sum":
        weights = mask / max(totals.num_sessions, 1)
    else:
        labels, index = session_of_token.unique(return_inverse=True)
        tokens = mask.new_zeros(len(labels)).index_add(0, index, mask).clamp(min=1.0)
        weights = mask / tokens[index] / max(totals.num_sessions, 1)
    return weights.to(torch.float32)
