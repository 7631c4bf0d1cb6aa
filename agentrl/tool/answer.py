"""What a tool returned, as text of bounded length: two hundred megabytes must cost no more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import InfrastructureError
from agentrl.finite import check_reward
from agentrl.tool.base import ToolReply
from agentrl.types import ToolStatus


@dataclass(slots=True, kw_only=True)
class Answer:
    """How one call ended, before it is cut to tokens."""

    content: str
    status: ToolStatus
    reward: float = 0.0
    cut_chars: int = 0
    """Characters cut off the end of ``content``."""
    cut_short: bool = False
    """A limit of the tool's own ended the work before it was done."""
    failure: BaseException | None = None
    """What our side failed with, under ``INFRA_ERROR``."""
    retries: int = 0
    breaker_open: bool = False


def answer_of(value: Any, *, tool: str, max_chars: int) -> Answer:
    """Return a tool's value as an answer.

    Args:
        max_chars: how much of a value that is no text is written out.

    Raises:
        InfrastructureError: a type that a tool must not return.
        RewardError: it pays what is no finite number.
    """
    reward, cut_chars, cut_short = 0.0, 0, False
    if isinstance(value, ToolReply):
        reward = check_reward(value.reward, where=f"tool {tool!r}")
        cut_chars, cut_short, value = value.cut_chars, value.cut_short, value.content
    if isinstance(value, (dict, list, tuple)):
        text, is_whole = _as_json(value, max_chars)
        cut_chars = max(cut_chars, 0 if is_whole else 1)
    else:
        text = _plain(value)
    return Answer(
        content=text,
        status=ToolStatus.OK,
        reward=reward,
        cut_chars=cut_chars,
        cut_short=cut_short,
    )


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, (bool, int, float)):
        return str(value)
    raise InfrastructureError(
        f"the tool returned {type(value).__name__}; a tool returns text, a number, or JSON values"
    )


def _as_json(value: Any, max_chars: int) -> tuple[str, bool]:
    """Return JSON text, and whether all of it is there."""
    pieces: list[str] = []
    length = 0
    for piece in _pieces(value, max_chars):
        pieces.append(piece)
        length += len(piece)
        if length > max_chars:
            return "".join(pieces)[:max_chars], False
    return "".join(pieces), True


def _pieces(value: Any, longest: int) -> Iterator[str]:
    """Yield JSON text piece by piece: the encoder of the standard library makes it whole."""
    if isinstance(value, Mapping):
        yield "{"
        for index, (key, inner) in enumerate(value.items()):
            yield f"{', ' if index else ''}{_scalar(str(key), longest)}: "
            yield from _pieces(inner, longest)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        for index, inner in enumerate(value):
            if index:
                yield ", "
            yield from _pieces(inner, longest)
        yield "]"
    else:
        yield _scalar(value, longest)


def _scalar(value: Any, longest: int) -> str:
    if not isinstance(value, (str, int, float, type(None))):
        value = str(value)
    if isinstance(value, str):
        value = value[: longest + 1]
    return json.dumps(value, ensure_ascii=False)


def named(error: BaseException) -> str:
    """Return type and message of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
