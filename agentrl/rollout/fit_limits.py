"""Lengths of an episode that work together, and with the positions of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from agentrl.agent.limits import LoopLimits
from agentrl.errors import ConfigError

LENGTHS = ("max_context_tokens", "max_response_tokens", "max_turn_tokens")
"""From the widest to the narrowest."""
Limits = TypeVar("Limits", bound=LoopLimits)


def fitted(limits: Limits, *, given: Collection[str] = (), positions: int | None = None) -> Limits:
    """Return limits of which those that nobody gave follow the others.

    The context takes at most the model's positions; an answer that would leave no room for a prompt
    takes half of the context; a turn takes at most the answer.

    Args:
        given: those of ``LENGTHS`` that a user set: they stay.
        positions: of the model; None where unknown.
    """
    context, response, turn = (getattr(limits, name) for name in LENGTHS)
    if positions is not None and "max_context_tokens" not in given:
        context = min(context, positions)
    if response >= context > 1 and "max_response_tokens" not in given:
        response = context // 2
    if "max_turn_tokens" not in given:
        turn = min(turn, response)
    return replace(
        limits, max_context_tokens=context, max_response_tokens=response, max_turn_tokens=turn
    )


def refuse_beyond_positions(limits: LoopLimits, positions: int | None, *, source: str) -> None:
    """Refuse sequences that are longer than the model has positions.

    Args:
        positions: None where the model's configuration has no say.
        source: names the model.

    Raises:
        ConfigError: with settings that work together.
    """
    if positions is None:
        return
    context, response = limits.max_context_tokens, limits.max_response_tokens
    if context <= positions and response < context:
        return
    passed = "max_context_tokens" if context > positions else "max_response_tokens"
    raise ConfigError(
        f"the model {source!r} has {positions} positions, and "
        f"rollout.{passed}={getattr(limits, passed)} with the prompt takes more; these settings "
        f"work together: {as_settings(fitted(limits, positions=positions))}"
    )


def as_settings(limits: LoopLimits) -> str:
    """Return the lengths as they are written on the command line."""
    return " ".join(f"rollout.{name}={getattr(limits, name)}" for name in LENGTHS)
