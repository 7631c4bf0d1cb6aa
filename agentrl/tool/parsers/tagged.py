"""Calls whose arguments stand in tags, one by one: shared by Qwen3-Coder, GLM and MiniMax-M2."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agentrl.tool.parsers.scanner import Marker
from agentrl.tool.parsers.typed_text import ParameterTypes

_OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"


@dataclass(slots=True, frozen=True, kw_only=True)
class Tags:
    """How a format writes the arguments of a call."""

    open: re.Pattern[str]
    """What opens an argument; its first group is the name."""
    close: str
    """What ends an argument."""
    implied: str
    """Regular expression of what ends an argument, too, whose closing tag is missing."""
    ends: tuple[str, ...]
    """What ends the call."""
    block_end: str
    """What ends all: an argument that reaches it is broken."""
    gap: re.Pattern[str] = re.compile(r"\s*")
    """What may stand between the tags."""

    def value_end(self) -> re.Pattern[str]:
        """Return the pattern of what ends an argument; group ``close`` where that is regular."""
        implied = f"|(?P<implied>{self.implied})" if self.implied else ""
        return re.compile(
            f"(?P<close>{re.escape(self.close)}){implied}|{re.escape(self.block_end)}"
        )


class TaggedArguments:
    """Reads the arguments of one call.

    Args:
        tags: how the format writes them.
        trim: what is cut off a value: ``both`` (one line break at either end), ``pair`` (one at
            both ends, where both have one), or ``none``.
    """

    def __init__(self, tags: Tags, *, trim: str) -> None:
        self._tags = tags
        self._value_end = tags.value_end()
        self._trim = trim

    def read(self, marker: Marker, start: int, types: ParameterTypes) -> tuple[dict[str, Any], int]:
        """Return the arguments from ``start`` on, and where what ends the call stands.

        Raises:
            ValueError: with a message for the model.
        """
        text = marker.text
        arguments: dict[str, Any] = {}
        position = self._skip_gap(text, start)
        while (opened := self._tags.open.match(text, position)) is not None:
            name = opened[1].strip()
            if name in arguments:
                raise ValueError(f"the argument {name[:40]!r} is given twice")
            closed = marker.search(self._value_end, opened.end())
            if closed is None or not (closed["close"] or closed.groupdict().get("implied")):
                raise ValueError(f"the argument {name[:40]!r} is not closed")
            if text.rfind(_OPEN_THOUGHT, opened.end(), closed.start()) > text.rfind(
                _CLOSE_THOUGHT, opened.end(), closed.start()
            ):
                # As likely as not, what closes it stands in that thought.
                raise ValueError(f"the argument {name[:40]!r} opens a thought")
            try:
                value = self._trimmed(text[opened.end() : closed.start()])
                arguments[name] = types.value(name, value)
            except ValueError as error:
                raise ValueError(f"{name[:40]} is no valid JSON, {error}") from None
            position = self._skip_gap(text, closed.end() if closed["close"] else closed.start())
        if position < len(text) and not text.startswith(self._tags.ends, position):
            raise ValueError("other text stands where an argument could")
        return arguments, position

    def _skip_gap(self, text: str, position: int) -> int:
        gap = self._tags.gap.match(text, position)
        return position if gap is None else gap.end()

    def _trimmed(self, value: str) -> str:
        if self._trim == "none":
            return value
        if self._trim == "pair" and not (len(value) > 1 and value[0] == value[-1] == "\n"):
            return value
        return value.removeprefix("\n").removesuffix("\n")
