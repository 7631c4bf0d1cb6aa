"""How the losses of tokens become one number.

The loss of a mini-batch is ``sum(weight * token_loss)``. The weights are computed once over the
whole mini-batch from its final mask, then cut along with the rows: so the gradient cannot depend
on how a mini-batch is split into micro-batches or spread over ranks.

What ``seq`` counts is the *session*: one episode counts once, however many rows (segments) its
history was cut into. Where every session is one row, the modes are those of other frameworks that
count rows. ``session-mean`` and ``seq-mean-token-mean`` are one mode: the first says what is
counted, the second is the name by which users know it. Sessions and turns without a trained token
do not count.

Legend: ``N`` tokens of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS: dict[str, str] = {
    "token-mean": "every trained token weighs the same",
    "token-sum": "tokens are summed: the larger the mini-batch, the larger the gradient",
    "seq-mean-token-sum": "tokens of a session are summed, sessions averaged",
    "seq-mean-token-sum-norm": "the same, over a fixed number of tokens (Dr. GRPO)",
    "seq-mean-token-mean": "every session weighs the same, its tokens share that",
    "session-mean": "another name of seq-mean-token-mean",
    "turn-mean": "every turn weighs the same, its tokens share that",
}
"""Name -> what it means."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Denominators:
    """What a mini-batch divides by: totals over all its micro-batches and ranks."""

    num_tokens: int
    """Tokens with mask 1."""
    num_sessions: int
    """Sessions with at least one such token."""
    num_turns: int | None = None
    """Turns with at least one such token; None where turns are not known."""


def denominators(
    loss_mask: Tensor, session_of_token: Tensor, turn_of_token: Tensor | None = None
) -> Denominators:
    """Count the trained tokens, and the sessions and turns that hold any.

    Args:
        loss_mask: bool [N], after every filter.
        session_of_token: int64 [N].
        turn_of_token: int [N], index of the turn within its session; -1 where not sampled.

    Raises:
        ValueError: a trained token belongs to no turn.
    """
    num_turns = None
    if turn_of_token is not None:
        units = _turn_units(loss_mask, session_of_token, turn_of_token)
        num_turns = len(units[loss_mask].unique())
    return Denominators(
        num_tokens=int(loss_mask.sum()),
        num_sessions=len(session_of_token[loss_mask].unique()),
        num_turns=num_turns,
    )


def token_weights(
    loss_mask: Tensor,
    session_of_token: Tensor,
    turn_of_token: Tensor | None,
    mode: str,
    totals: Denominators,
    *,
    norm_tokens: int | None = None,
) -> Tensor:
    """Return the weight of every token in the loss, float32 [N]; 0 where the mask is False.

    Args:
        loss_mask: bool [N].
        session_of_token: int64 [N]; all rows of a session are in this batch.
        turn_of_token: int [N], index of the turn within its session, -1 where not sampled; only
            ``turn-mean`` reads it.
        mode: one of :data:`AGGREGATIONS`.
        totals: of the whole mini-batch, over all ranks.
        norm_tokens: what ``seq-mean-token-sum-norm`` divides by: fixed over a run, never the width
            of a padded batch.

    Raises:
        ValueError: an unknown mode, or one without what it needs.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
    mask = loss_mask.double()
    if mode == "token-sum":
        weights = mask
    elif mode == "token-mean":
        weights = mask / max(totals.num_tokens, 1)
    elif mode == "turn-mean":
        if turn_of_token is None or totals.num_turns is None:
            raise ValueError("turn-mean needs the turn of every token, also in denominators()")
        units = _turn_units(loss_mask, session_of_token, turn_of_token)
        weights = _shares(mask, units) / max(totals.num_turns, 1)
    elif mode.startswith("seq-mean-token-sum"):
        weights = mask / max(totals.num_sessions, 1)
        if mode == "seq-mean-token-sum-norm":
            if norm_tokens is None or norm_tokens < 1:
                raise ValueError(f"{mode} needs norm_tokens of 1 or more, got {norm_tokens}")
            weights = weights / norm_tokens
    else:
        weights = _shares(mask, session_of_token) / max(totals.num_sessions, 1)
    return weights.to(torch.float32)


def _shares(mask: Tensor, unit_of_token: Tensor) -> Tensor:
    """Split 1 evenly among the trained tokens of every unit: float64 [N]."""
    labels, index = unit_of_token.unique(return_inverse=True)
    tokens = mask.new_zeros(len(labels)).index_add(0, index, mask).clamp(min=1.0)
    return mask / tokens[index]


def _turn_units(loss_mask: Tensor, session_of_token: Tensor, turn_of_token: Tensor) -> Tensor:
    """Number the turns of all sessions: int64 [N], one number per pair of session and turn."""
    turn = turn_of_token.long()
    if bool((turn[loss_mask] < 0).any()):
        raise ValueError("a trained token has turn -1: only sampled tokens can be trained")
    if not len(turn):
        return turn
    _, session = session_of_token.unique(return_inverse=True)
    turn = turn.clamp(min=0)
    return session * (int(turn.max()) + 1) + turn
