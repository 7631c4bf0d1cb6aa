"""What an environment returned, checked: a wrong type is an error with a name, never a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.env.base import Observation
from agentrl.errors import EnvError, RewardError, ToolSpecError
from agentrl.finite import REWARD_LIMIT, check_reward, got
from agentrl.sandbox.grading import why_nothing_matches
from agentrl.tool.decorator import entry_of
from agentrl.types import Score

_ROLES = ("system", "user", "assistant", "tool")


def check_reset(value: Any, *, env: str) -> tuple[Observation, dict[str, Any]]:
    """Return ``(observation, info)`` of a reset.

    Raises:
        EnvError: wrong shape or type, or nothing for the model to read.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        raise EnvError(f"{env}: reset must return (observation, info), got {got(value)}")
    observation = _check_observation(value[0], where=f"{env}: reset")
    if not observation or (isinstance(observation, str) and not observation.strip()):
        raise EnvError(f"{env}: reset returned an empty observation: the model needs a prompt")
    return observation, _check_info(value[1], where=f"{env}: reset")


def check_step(value: Any, *, env: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """Return ``(observation, reward, terminated, truncated, info)`` of a step.

    Raises:
        EnvError: wrong shape or type.
        RewardError: the reward is no finite number.
    """
    if not isinstance(value, tuple) or len(value) != 5:
        raise EnvError(
            f"{env}: step must return (observation, reward, terminated, truncated, info), "
            f"got {got(value)}"
        )
    observation, reward, terminated, truncated, info = value
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise EnvError(f"{env}: step returned {name}={got(flag)}; it must be a bool")
    return (
        _check_observation(observation, where=f"{env}: step"),
        check_reward(reward, where=f"{env}: step"),
        bool(terminated),
        bool(truncated),
        _check_info(info, where=f"{env}: step"),
    )


def check_score(value: Any, *, env: str) -> Score:
    """Return what a rubric gave.

    Raises:
        RewardError: no Score, or one whose numbers are not finite.
    """
    if not isinstance(value, Score):
        raise RewardError(f"{env}: the rubric must return a Score, got {got(value)}")
    if not isinstance(value.success, (bool, np.bool_)):
        raise RewardError(f"{env}: Score.success must be a bool, got {got(value.success)}")
    if not isinstance(value.parts, Mapping):
        raise RewardError(f"{env}: Score.parts must be a mapping, got {got(value.parts)}")
    if not isinstance(value.turn_rewards, Sequence | np.ndarray) or isinstance(
        value.turn_rewards, str | bytes
    ):
        raise RewardError(
            f"{env}: Score.turn_rewards must be a sequence of floats, one a turn, "
            f"got {got(value.turn_rewards)}"
        )
    if isinstance(value.tampering, str) or not all(isinstance(n, str) for n in value.tampering):
        raise RewardError(
            f"{env}: Score.tampering must be a sequence of names, got {got(value.tampering)}"
        )
    return Score(
        reward=check_reward(value.reward, where=f"{env}: rubric"),
        success=bool(value.success),
        parts={
            str(name): check_reward(part, where=f"{env}: part {name!r} of the rubric")
            for name, part in value.parts.items()
        },
        turn_rewards=tuple(
            check_reward(reward, where=f"{env}: reward of turn {turn} of the rubric")
            for turn, reward in enumerate(value.turn_rewards)
        ),
        tampering=tuple(value.tampering),
    )


def check_names(value: Any, *, env: str, field: str) -> tuple[str, ...]:
    """Return what an environment lists under ``field``.

    Raises:
        EnvError: no list of names.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise EnvError(f"{env}: {field} must be a list of names, got {got(value)}")
    for name in value:
        if not isinstance(name, str):
            raise EnvError(f"{env}: {field} must be a list of names, but holds {got(name)}")
    return tuple(value)


def check_tools(value: Any, *, env: str) -> tuple[str, ...]:
    """Return the tools that an environment names; a function marked with ``@tool`` by where it is.

    Raises:
        EnvError: no list of names and marked functions.
    """
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    try:
        named = [entry_of(tool) if callable(tool) else tool for tool in value] if is_list else value
    except ToolSpecError as error:
        raise EnvError(f"{env}: tools: {error}") from error
    return check_names(named, env=env, field="tools")


def check_anchor(value: Any, *, env: str) -> str | None:
    """Return the key of a state.

    Raises:
        EnvError: neither text nor None.
    """
    if value is not None and not isinstance(value, str):
        raise EnvError(f"{env}: anchor must return text or None, got {type(value).__name__}")
    return value


def check_artifacts(value: Any, *, env: str) -> tuple[str, ...]:
    """Return the patterns of the files that an environment wants.

    Raises:
        EnvError: no list of patterns, or one that no file of a workspace can match.
    """
    patterns = check_names(value, env=env, field="artifacts")
    for pattern in patterns:
        if reason := why_nothing_matches(pattern):
            raise EnvError(f"{env}: artifacts: no file can match {pattern!r}: {reason}")
    return patterns


def check_rubric(value: Any, *, env: str) -> None:
    """Refuse a rubric that cannot score.

    Raises:
        EnvError: neither None nor an object with a method ``score``.
    """
    if value is not None and (isinstance(value, type) or not callable(getattr(value, "score", 0))):
        raise EnvError(
            f"{env}: rubric must be None or an object with a method score(episode), "
            f"got {got(value)}"
        )


def _check_observation(value: Any, *, where: str) -> Observation:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise EnvError(
            f"{where} returned an observation of {got(value)}; it must be text or chat messages"
        )
    for position, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise EnvError(f"{where}: message {position} must be a mapping, got {got(message)}")
        if message.get("role") not in _ROLES:
            raise EnvError(
                f"{where}: message {position} has role {message.get('role')!r}; "
                f"it must be one of {', '.join(_ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise EnvError(
                f"{where}: the content of message {position} must be text, "
                f"got {got(message.get('content'))}"
            )
    return list(value)


def _check_info(value: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise EnvError(f"{where} returned info={got(value)}; it must be a mapping")
    return dict(value)


__all__ = [
    "REWARD_LIMIT",
    "check_names",
    "check_tools",
    "check_reset",
    "check_reward",
    "check_rubric",
    "check_score",
    "check_step",
]
