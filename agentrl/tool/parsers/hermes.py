"""The Hermes format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Spoken by Hermes and Qwen 2.5/3 models, and by the built-in tiny one.
"""

from __future__ import annotations

from typing import Any

from agentrl.tool.parsers.base import ParsedTurn, read_json
from agentrl.types import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FORM = '{"name": "...", "arguments": {...}}'


class HermesParser:
    """Parses calls between ``<tool_call>`` tags.

    A last call without its closing tag counts where its JSON is complete. Content is stripped at
    both ends: the template writes the white space between content and calls.
    """

    def parse(self, text: str) -> ParsedTurn:
        """Parse one turn. Never raises."""
        start = text.find(_OPEN)
        if start < 0:
            return ParsedTurn(content=text, tool_calls=())
        contents: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while start >= 0:
            contents.append(text[position:start])
            call, position = _parse_call(text, start + len(_OPEN))
            calls.append(call)
            start = text.find(_OPEN, position)
        contents.append(text[position:])
        content = "\n".join(piece.strip() for piece in contents if piece.strip())
        return ParsedTurn(content=content, tool_calls=tuple(calls))


def _parse_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Parse the call whose body begins at ``start``; return it and where the rest begins."""
    body = _skip_space(text, start)
    try:
        value, end = read_json(text, body)
        end = _skip_space(text, end)
        if text.startswith(_CLOSE, end):
            return _as_call(value), end + len(_CLOSE)
        if end == len(text):
            return _as_call(value), end
        problem = "text follows the object"
    except ValueError as error:
        problem = str(error)
    close = text.find(_CLOSE, start)
    missing = f" and no {_CLOSE}" if close < 0 else ""
    rest = len(text) if close < 0 else close + len(_CLOSE)
    return _broken("", f"the tool call is no valid JSON ({problem}){missing}; write {_FORM}"), rest


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _as_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        return _broken("", f"a tool call is an object, got {_kind(value)}; write {_FORM}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _broken("", f"the tool call has no name; write {_FORM}")
    surplus = [key for key in value if key not in ("name", "arguments")]
    if surplus:
        return _broken(name, f"a tool call has no {surplus[0][:40]!r}; write {_FORM}")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return _broken(name, f"arguments must be an object, got {_kind(arguments)}; write {_FORM}")
    return ToolCall(name=name, arguments=arguments)


def _broken(name: str, error: str) -> ToolCall:
    return ToolCall(name=name, arguments={}, error=error)


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")
