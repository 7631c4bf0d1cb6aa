"""Rewards as finite numbers: what an environment, a grader or a tool paid, checked."""

from __future__ import annotations

import math
import reprlib
import struct
from typing import Any

import numpy as np

from agentrl.errors import RewardError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
REWARD_LIMIT = 1e6
"""Rewards beyond this are taken for a mistake: one of them would drown its whole batch."""


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
        raise RewardError(f"{where}: the reward must be a float, got {got(value)}")
    number = _stored_float(value)
    if number is None or not abs(number) <= REWARD_LIMIT:  # also true for NaN
        finite = number is None or math.isfinite(number)
        what = f"beyond the limit of {REWARD_LIMIT:g}" if finite else "not finite"
        raise RewardError(f"{where}: the reward is {got(value)}, {what}; return a finite float")
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


def got(value: Any) -> str:
    """Return what a value is, for messages: shortened, with its type."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # the object is a user's: its repr may fail too
        text = "an object that cannot be shown"
    return f"{text} ({type(value).__name__})"
