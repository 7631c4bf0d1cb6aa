"""JSON read strictly enough to mean one thing only, in time that is linear in what is read."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 32
"""Levels of lists and objects in a value."""
_WINDOW = 1024
_NEAR_END = 16
"""Longer than any literal or escape that the end of a window can cut."""


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value at ``start``: no NaN, no duplicate keys, at most 32 levels.

    Returns:
        The value, and the offset of what follows it.

    Raises:
        ValueError: with a message for the model.
    """
    try:
        value, length = _decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    end = start + length
    if text.find("\\u", start, end) >= 0:
        _refuse_surrogates(value)
    return value, end


def kind(value: Any) -> str:
    """Return the JSON type of ``value`` in words."""
    names = {
        str: "a string",
        list: "a list",
        dict: "an object",
        type(None): "null",
        bool: "true or false",
    }
    return names.get(type(value), "a number")


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decode from a window that grows while it may have cut the value.

    The decoder counts the lines of its whole text for every error, so that a long text with many
    broken calls would take quadratic time.
    """
    size = _WINDOW
    while True:
        window = text[start : start + size]
        is_whole = start + size >= len(text)
        try:
            value, end = _decoder.raw_decode(window)
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated") or error.pos > len(window) - _NEAR_END
            if is_whole or not is_cut:
                raise
        else:
            if is_whole or end < len(window):
                return value, end
        size *= 4


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:40]!r} is given twice")
            seen.add(key)
    return value


def is_deeper(value: Any, limit: int) -> bool:
    """Return whether lists and objects are nested in more than ``limit`` levels, at any depth."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None


_decoder = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
)
