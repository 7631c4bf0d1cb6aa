"""What an environment returned, checked: a wrong type is an error with a name, never a default."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.env.base import Observation
from agentrl.errors import EnvError, RewardError
from agentrl.types import Score

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_ROLES = ("system", "user", "assistant", "tool")
REWARD_LIMIT = 1e6
"""Rewards beyond this are taken for a mistake: one of them would drown its whole batch."""


def check_reset(value: Any, *, env: str) -> tuple[Observation, dict[str, Any]]:
    """Return ``(observation, info)`` of a reset.

    Raises:
        EnvError: wrong shape or type, or nothing for the model to read.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        raise EnvError(f"{env}: reset must return (observation, info), got {_got(value)}")
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
            f"got {_got(value)}"
        )
    observation, reward, terminated, truncated, info = value
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise EnvError(f"{env}: step returned {name}={_got(flag)}; it must be a bool")
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
        raise RewardError(f"{env}: the rubric must return a Score, got {_got(value)}")
    if not isinstance(value.success, (bool, np.bool_)):
        raise RewardError(f"{env}: Score.success must be a bool, got {_got(value.success)}")
    if not isinstance(value.parts, Mapping):
        raise RewardError(f"{env}: Score.parts must be a mapping, got {_got(value.parts)}")
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
    )


def check_reward(value: Any, *, where: str) -> float:
    """Return the reward as a float.

    Python and numpy scalars pass; bool, None, text, lists and tensors do not, since each of them
    has turned up as a bug.

    Raises:
        RewardError: not a number, not finite, or beyond :data:`REWARD_LIMIT`.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise RewardError(f"{where}: the reward must be a float, got {_got(value)}")
    if not abs(value) <= REWARD_LIMIT:  # also true for NaN
        infinite = value != value or value in (math.inf, -math.inf)
        what = "not finite" if infinite else f"beyond the limit of {REWARD_LIMIT:g}"
        raise RewardError(f"{where}: the reward is {value!r}, {what}; return a finite float")
    return float(value)


def _check_observation(value: Any, *, where: str) -> Observation:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise EnvError(
            f"{where} returned an observation of {_got(value)}; it must be text or chat messages"
        )
    for position, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise EnvError(f"{where}: message {position} must be a mapping, got {_got(message)}")
        if message.get("role") not in _ROLES:
            raise EnvError(
                f"{where}: message {position} has role {message.get('role')!r}; "
                f"it must be one of {', '.join(_ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise EnvError(
                f"{where}: the content of message {position} must be text, "
                f"got {_got(message.get('content'))}"
            )
    return list(value)


def _check_info(value: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise EnvError(f"{where} returned info={_got(value)}; it must be a mapping")
    return dict(value)


def _got(value: Any) -> str:
    try:
        text = _SHORT.repr(value)
    except Exception:  # the object is the environment's: its repr may fail too
        text = "an object that cannot be shown"
    return f"{text} ({type(value).__name__})"
