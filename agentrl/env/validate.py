"""What an environment returned, checked: a wrong type is an error with a name, never a default."""

from __future__ import annotations

import math
import reprlib
import struct
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
    if not isinstance(value.turn_rewards, Sequence | np.ndarray) or isinstance(
        value.turn_rewards, str | bytes
    ):
        raise RewardError(
            f"{env}: Score.turn_rewards must be a sequence of floats, one a turn, "
            f"got {_got(value.turn_rewards)}"
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
    number = _stored_float(value)
    if number is None or not abs(number) <= REWARD_LIMIT:  # also true for NaN
        finite = number is None or math.isfinite(number)
        what = f"beyond the limit of {REWARD_LIMIT:g}" if finite else "not finite"
        raise RewardError(f"{where}: the reward is {_got(value)}, {what}; return a finite float")
    return number


def _stored_float(value: Any) -> float | None:
    """Return the number that is stored; None where it is beyond every float.

    A subclass of int or float may answer ``abs``, ``==`` and ``float`` with something else.
    """
    try:
        if isinstance(value, int):
            return float(int.__add__(value, 0))
        stored = value if isinstance(value, float) else value.item()
        return struct.unpack("d", struct.pack("d", stored))[0]
    except (OverflowError, struct.error):
        return None


def check_tools(value: Any, *, env: str) -> tuple[str, ...]:
    """Return the tools that an environment names.

    Raises:
        EnvError: no list of names.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise EnvError(f"{env}: tools must be a list of names, got {_got(value)}")
    for name in value:
        if not isinstance(name, str):
            raise EnvError(f"{env}: tools must be a list of names, but holds {_got(name)}")
    return tuple(value)


def check_rubric(value: Any, *, env: str) -> None:
    """Refuse a rubric that cannot score.

    Raises:
        EnvError: neither None nor an object with a method ``score``.
    """
    if value is not None and (isinstance(value, type) or not callable(getattr(value, "score", 0))):
        raise EnvError(
            f"{env}: rubric must be None or an object with a method score(episode), "
            f"got {_got(value)}"
        )


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
