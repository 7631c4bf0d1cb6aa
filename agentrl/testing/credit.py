"""Small credit batches, written session by session: for tests of advantage estimators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algo.credit import CreditBatch


@dataclass(slots=True, kw_only=True)
class SessionCredit:
    """One session of a :class:`~agentrl.algo.credit.CreditBatch`; None leaves a field out."""

    group: int = 0
    tokens: Sequence[int] = (1,)
    """Sampled tokens of each turn."""
    outcome: float = 0.0
    turn_rewards: Sequence[float] | None = None
    """One per turn; None: nothing."""
    named: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    penalties: Sequence[float] | None = None
    values: Sequence[float] | None = None
    bootstrap: float | None = None
    old_logprobs: Sequence[float] | None = None
    sum_pi_squared: Sequence[float] | None = None
    is_weights: Sequence[float] | None = None
    greedy: float | None = None
    anchors: Sequence[int] | None = None
    parent: int | None = None
    branch_turn: int = 0


def make_credit(*sessions: SessionCredit) -> CreditBatch:
    """Pack sessions into one batch, in order.

    Raises:
        ValueError: some sessions have an optional field and others do not.
    """

    def optional(name: str, dtype: torch.dtype) -> Tensor | None:
        given = [getattr(session, name) for session in sessions]
        if all(value is None for value in given):
            return None
        if any(value is None for value in given):
            raise ValueError(f"{name}: give it for every session or for none")
        flat = [x for value in given for x in (value if isinstance(value, Sequence) else [value])]
        return torch.tensor(flat, dtype=dtype)

    def scalars(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(session, name) for session in sessions], dtype=dtype)

    paid = [
        s.turn_rewards if s.turn_rewards is not None else [0.0] * len(s.tokens) for s in sessions
    ]
    if any(len(rewards) != len(s.tokens) for rewards, s in zip(paid, sessions, strict=True)):
        raise ValueError("turn_rewards: one for each turn")
    return CreditBatch(
        group=scalars("group", torch.int64),
        turns_per_session=torch.tensor([len(s.tokens) for s in sessions], dtype=torch.int64),
        tokens_per_turn=torch.tensor([n for s in sessions for n in s.tokens], dtype=torch.int64),
        outcome_rewards=scalars("outcome", torch.float64),
        turn_rewards=torch.tensor([r for rewards in paid for r in rewards], dtype=torch.float64),
        truncated=scalars("truncated", torch.bool),
        named_rewards={
            name: torch.tensor([s.named[name] for s in sessions], dtype=torch.float64)
            for name in (sessions[0].named if sessions else ())
        },
        token_penalties=optional("penalties", torch.float32),
        values=optional("values", torch.float32),
        bootstrap_values=optional("bootstrap", torch.float32),
        old_logprobs=optional("old_logprobs", torch.float32),
        sum_pi_squared=optional("sum_pi_squared", torch.float32),
        is_weights=optional("is_weights", torch.float32),
        greedy_rewards=optional("greedy", torch.float64),
        anchors=optional("anchors", torch.int64),
        parent=optional("parent", torch.int64),
        branch_turn=scalars("branch_turn", torch.int64),
    )
