"""What a tool-call parser is, and JSON read strictly enough to mean one thing only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.types import ToolCall

_MAX_DEPTH = 32


@dataclass(slots=True, frozen=True, kw_only=True)
class ParsedTurn:
    """What a turn says."""

    content: str
    """The text outside the calls."""
    tool_calls: tuple[ToolCall, ...]


class ToolCallParser(Protocol):
    """Finds the tool calls in the text of a turn."""

    def parse(self, text: str) -> ParsedTurn:
        """Parse one turn. Never raises: a broken call is a ToolCall with ``error`` set."""
        ...


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value at ``start``: no NaN, no duplicate keys, at most 32 levels.

    Returns:
        The value, and the offset of what follows it.

    Raises:
        ValueError: with a message for the model.
    """
    try:
        value, end = _decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None
    if _is_deeper(value, _MAX_DEPTH):
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    if "\\u" in text:
        _refuse_surrogates(value)
    return value, end


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
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} is given twice")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
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
