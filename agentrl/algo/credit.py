"""Credit: from rewards to one advantage per sampled token.

Estimators are pure functions of a :class:`CreditBatch`. It holds *sampled* tokens only, packed, so
that observations between two turns cannot break a running return: they are not there.

Legend: ``S`` sessions, ``K`` turns of all sessions in order, ``M`` sampled tokens of all turns in
order. Failed sessions are left out by the caller before anything here sees them. Sums run in
float64, so that a result does not depend on the order of a group's members beyond the last bits.

A plug-in is a function by import path (``algo.advantage=./mine.py:estimate``)::

    @estimator(needs=("anchors",), min_group=2)
    def estimate(batch: CreditBatch, *, gamma: float = 1.0) -> Credit:
        return Credit(batch.spread_sessions(batch.returns - batch.returns.mean()))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from agentrl.algo.ragged import segment_sum, spread
from agentrl.errors import RegistryError
from agentrl.registry import Registry

NEEDS: dict[str, str] = {
    "values": "a critic",
    "old_logprobs": "the trainer's log-probabilities of the policy that sampled",
    "sum_pi_squared": "the sum of squared probabilities at every sampled token",
    "greedy_rewards": "a greedy episode for every prompt",
    "anchors": "environments that implement anchor()",
    "tree": "episodes that branch (rollout.tree), so environments with snapshot() and restore()",
}
"""What an estimator may ask for beyond rewards -> what provides it."""


@dataclass(frozen=True, kw_only=True)  # no slots: derived indices are kept with the batch
class CreditBatch:
    """What estimators see of a step: rewards, where they were earned, and who belongs together.

    Optional fields are there where the estimator declares them in ``needs``. A session of 0 turns
    has no token to credit, but its outcome counts in the baseline of its group.
    """

    group: Tensor
    """int64 [S], equal where two sessions answer the same prompt."""
    turns_per_session: Tensor
    """int64 [S]; may be 0."""
    tokens_per_turn: Tensor
    """int64 [K]; may be 0 (a turn that the engine ended before its first token)."""
    outcome_rewards: Tensor
    """float64 [S], weighted; earned at the end of the session."""
    turn_rewards: Tensor
    """float64 [K], weighted: of the environment's step and of the tools."""
    truncated: Tensor
    """bool [S]: a limit, not the environment, ended the episode."""
    named_rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> float64 [S], weighted; they add up to the return without ``token_penalties``."""
    named_weights: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> float64 [S]: the weight that ``named_rewards`` carry; 1 where the name is missing.
    For estimators that rescale every reward by itself, which takes its weight out."""
    token_penalties: Tensor | None = None
    """float32 [M]: added to the reward of a token (minus the weighted KL to the reference)."""
    values: Tensor | None = None
    """float32 [M]: the critic's value of the state in which the token was chosen."""
    bootstrap_values: Tensor | None = None
    """float32 [S]: its value of the state after the last token; read where truncated."""
    old_logprobs: Tensor | None = None
    """float32 [M]"""
    sum_pi_squared: Tensor | None = None
    """float32 [M]: sum over the vocabulary of squared probabilities."""
    is_weights: Tensor | None = None
    """float32 [M]: importance weights of the rollout correction, where it is on."""
    greedy_rewards: Tensor | None = None
    """float64 [S]: return of the greedy episode of the session's prompt."""
    anchors: Tensor | None = None
    """int64 [K]: equal where two turns start from the same state; -1 for none."""
    parent: Tensor | None = None
    """int64 [S]: the session that this one branched off from; -1 for a trunk."""
    branch_turn: Tensor | None = None
    """int64 [S]: turns before the branch, which are the parent's; 0 for a trunk."""

    @property
    def num_sessions(self) -> int:
        """S."""
        return len(self.group)

    @cached_property
    def num_tokens(self) -> int:
        """M."""
        return int(self.tokens_per_turn.sum())

    @cached_property
    def session_of_turn(self) -> Tensor:
        """int64 [K]."""
        return torch.repeat_interleave(self.turns_per_session)

    @cached_property
    def turn_of_token(self) -> Tensor:
        """int64 [M], index into the K turns."""
        return torch.repeat_interleave(self.tokens_per_turn)

    @cached_property
    def tokens_per_session(self) -> Tensor:
        """int64 [S]."""
        totals = torch.zeros(self.num_sessions, dtype=torch.int64)
        return totals.index_add(0, self.session_of_turn, self.tokens_per_turn)

    @cached_property
    def session_of_token(self) -> Tensor:
        """int64 [M]."""
        return torch.repeat_interleave(self.tokens_per_session)

    @cached_property
    def returns(self) -> Tensor:
        """Everything a session earned, token penalties included: float64 [S]."""
        total = self.outcome_rewards + segment_sum(self.turn_rewards, self.turns_per_session)
        if self.token_penalties is not None:
            total = total + segment_sum(self.token_penalties, self.tokens_per_session)
        return total

    def require(self, name: str) -> Tensor:
        """Return an optional field.

        Raises:
            ValueError: it is not there.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"the batch has no {name}: an estimator that reads it declares what provides it, "
                f"@estimator(needs=...), and gets it from the trainer"
            )
        return value

    def spread_sessions(self, values: Tensor) -> Tensor:
        """Give every token the value of its session: [S] -> [M] of the same dtype."""
        return spread(values, self.tokens_per_session)

    def spread_turns(self, values: Tensor) -> Tensor:
        """Give every token the value of its turn: [K] -> [M] of the same dtype."""
        return spread(values, self.tokens_per_turn)

    def select(self, sessions: Tensor) -> CreditBatch:
        """Return the sessions where the mask, bool [S], is True.

        Raises:
            ValueError: a branch is kept and its parent is not.
        """
        turns, tokens = sessions[self.session_of_turn], sessions[self.session_of_token]
        kept = {"session": sessions, "turn": turns, "token": tokens}
        fields: dict[str, Any] = {
            name: {key: value[sessions] for key, value in getattr(self, name).items()}
            for name in ("named_rewards", "named_weights")
        }
        for name, level in _LEVELS.items():
            value = getattr(self, name)
            fields[name] = None if value is None else value[kept[level]]
        if self.parent is not None:  # parents are named by their position
            position = sessions.cumsum(0) - 1
            parent = fields["parent"]
            if not bool(sessions[parent[parent >= 0]].all()):
                raise ValueError("branches go with the session that they branched off from")
            fields["parent"] = torch.where(parent >= 0, position[parent.clamp(min=0)], parent)
        return CreditBatch(**fields)


_LEVELS = {
    "group": "session",
    "turns_per_session": "session",
    "tokens_per_turn": "turn",
    "outcome_rewards": "session",
    "turn_rewards": "turn",
    "truncated": "session",
    "token_penalties": "token",
    "values": "token",
    "bootstrap_values": "session",
    "old_logprobs": "token",
    "sum_pi_squared": "token",
    "is_weights": "token",
    "greedy_rewards": "session",
    "anchors": "turn",
    "parent": "session",
    "branch_turn": "session",
}


@dataclass(slots=True, frozen=True)
class Credit:
    """What an estimator says of every sampled token.

    Floats of any width: those of agentrl compute and answer in float64, and the trainer casts.
    """

    advantages: Tensor
    """float [M]"""
    value_targets: Tensor | None = None
    """float [M]: what the critic is to predict; None where there is none."""
    value_mask: Tensor | None = None
    """bool [M]: tokens at which the critic is read and trained; None: all."""


class Estimator(Protocol):
    """A function of a batch and its own keyword arguments, marked by :func:`estimator`."""

    needs: frozenset[str]
    min_group: int
    unbiased: tuple[Mapping[str, Any], ...]

    def __call__(self, batch: CreditBatch, **kwargs: Any) -> Credit:
        """Return the credit of all M tokens."""
        ...


F = TypeVar("F", bound=Callable[..., Credit])


def estimator(
    *,
    needs: tuple[str, ...] = (),
    min_group: int = 1,
    unbiased: tuple[Mapping[str, Any], ...] = (),
) -> Callable[[F], F]:
    """Decorator: declare what an estimator is fed, and what it promises.

    Args:
        needs: keys of :data:`NEEDS`; what cannot be provided is refused before a run starts.
        min_group: fewest samples per prompt with which it says anything.
        unbiased: sets of arguments with which the expected policy gradient is that of the expected
            return (``{}`` for the defaults); none where it never is. A test computes the
            expectation for every set that a registered estimator claims.
    """
    unknown = sorted(set(needs) - NEEDS.keys())
    if unknown:
        raise ValueError(f"unknown needs {unknown}; known: {', '.join(NEEDS)}")

    def mark(function: F) -> F:
        marks = {"needs": frozenset(needs), "min_group": min_group, "unbiased": unbiased}
        for name, value in marks.items():
            setattr(function, name, value)
        return function

    return mark


ESTIMATORS: Registry[Any] = Registry(
    "advantage estimator",
    "agentrl.estimators",
    {
        "bilevel_gae": "agentrl.algo.gae:bilevel_gae",
        "discounted_outcome": "agentrl.algo.turns:discounted_outcome",
        "gae": "agentrl.algo.gae:gae",
        "gdpo": "agentrl.algo.group_baselines:gdpo",
        "gigpo": "agentrl.algo.turns:gigpo",
        "gpg": "agentrl.algo.group_baselines:gpg",
        "grpo": "agentrl.algo.group_baselines:grpo",
        "grpo_passk": "agentrl.algo.group_baselines:grpo_passk",
        "opo": "agentrl.algo.group_baselines:opo",
        "optimal_token_baseline": "agentrl.algo.token_baselines:optimal_token_baseline",
        "reinforce_plus_plus": "agentrl.algo.token_baselines:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "agentrl.algo.group_baselines:reinforce_plus_plus_baseline",
        "remax": "agentrl.algo.token_baselines:remax",
        "rloo": "agentrl.algo.group_baselines:rloo",
        # The same function: see its docstring.
        "tir_optimal_token_baseline": "agentrl.algo.token_baselines:optimal_token_baseline",
        "tree": "agentrl.algo.tree:tree",
        "turn_gae": "agentrl.algo.gae:turn_gae",
        "turn_return": "agentrl.algo.turns:turn_return",
    },
)
"""Name -> function. More come by entry point or import path."""


def get_estimator(name: str) -> Estimator:
    """Resolve a name or an import path; a function without the decorator needs nothing.

    Raises:
        RegistryError: nothing of that name, or something else than a function.
    """
    found = ESTIMATORS.get(name)
    if not callable(found):
        raise RegistryError(
            f"advantage estimator {name!r} is {type(found).__name__}, no function: give "
            "estimate(batch, *, ...)"
        )
    function = cast(Any, found)  # what Registry[Any] gives, before callable() narrowed it
    if all(hasattr(function, mark) for mark in ("needs", "min_group", "unbiased")):
        return function
    try:
        return estimator()(function)
    except (AttributeError, TypeError) as error:  # written in C, say
        raise RegistryError(
            f"advantage estimator {name!r} is {function!r}, which cannot be marked as one; give a "
            "Python function estimate(batch, *, ...)"
        ) from error
