"""The Hermes format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Spoken by Hermes and Qwen 2.5/3 models, and by the built-in tiny one.
"""

from __future__ import annotations

import re

from agentrl.tool.parsers.base import (
    NO_CONTEXT,
    CallObject,
    ParsedTurn,
    TurnContext,
    broken,
    read_value,
)
from agentrl.tool.parsers.scanner import Marker, Scanner
from agentrl.types import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = CallObject(form='{"name": "...", "arguments": {...}}')
_CLOSES = re.compile(_CLOSE)
_SCANNER = Scanner(_OPEN)


class HermesParser:
    """Parses calls between ``<tool_call>`` tags.

    A call without its closing tag counts where its JSON is complete and the turn ends, or another
    call begins. Content is stripped at both ends: the template writes the white space between
    content and calls.
    """

    stop_tokens: tuple[str, ...] = ()

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, _read, context)


def _read(marker: Marker) -> tuple[list[ToolCall], int]:
    text, start = marker.text, marker.end
    try:
        value, end = read_value(text, start, (_CLOSE, _OPEN))
    except ValueError as error:
        rest = marker.after(_CLOSES, start)
        missing = "" if text.endswith(_CLOSE, start, rest) else f" and no {_CLOSE}"
        problem = f"the tool call is no valid JSON ({error}){missing}; write {_CALL.form}"
        return [broken(problem)], rest
    is_closed = text.startswith(_CLOSE, end)
    return [_CALL.call(value)], end + len(_CLOSE) if is_closed else end
