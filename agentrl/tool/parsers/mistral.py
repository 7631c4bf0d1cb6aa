"""The Mistral format, in both its forms.

``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` (tokenizers up to v7), and
``[TOOL_CALLS]name[ARGS]{...}``, once for every call (from v11 on).
"""

from __future__ import annotations

import re

from agentrl.tool.parsers.base import (
    NO_CONTEXT,
    CallObject,
    ParsedTurn,
    TurnContext,
    broken,
    skip_space,
)
from agentrl.tool.parsers.scanner import Marker, Scanner
from agentrl.tool.parsers.strict_json import kind, read_json
from agentrl.types import ToolCall

_MARKER = "[TOOL_CALLS]"
_FORM = '[TOOL_CALLS][{"name": "...", "arguments": {...}}] or [TOOL_CALLS]name[ARGS]{...}'
_CALL = CallObject(form=_FORM, ignored=("id",), takes_text=True)
_SCANNER = Scanner(
    re.escape(_MARKER),
    open_thought=r"<think>|\[THINK\]",
    close_thought=r"</think>|\[/THINK\]",
)
_HEADER = re.compile(r"([^\s\[\]{}\"<]{1,200})\s*(?:\[CALL_ID\][^\[\]{}\s]{0,64}\s*)?(?:\[ARGS\])?")


class MistralParser:
    """Parses calls after ``[TOOL_CALLS]``; text that follows a call is content.

    Thoughts stand in ``[THINK]...[/THINK]``; Magistral's first version wrote ``<think>``.
    """

    stop_tokens: tuple[str, ...] = ()

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, _read, context)


def _read(marker: Marker) -> tuple[list[ToolCall], int]:
    text = marker.text
    start = skip_space(text, marker.match.end())
    if text.startswith("[", start):
        return _read_list(text, start + 1)
    if text.startswith("{", start):
        call, end = _read_object(text, start)
        return [call], end
    header = _HEADER.match(text, start)
    if header is None:
        return [broken(f"no tool call follows {_MARKER}; write {_FORM}")], start
    name = header[1]
    try:
        arguments, end = read_json(text, skip_space(text, header.end()))
    except ValueError as error:
        problem = f"the arguments are no valid JSON ({error}); write {_FORM}"
        return [broken(problem, name=name)], _next_marker(text, start)
    if not isinstance(arguments, dict):
        problem = f"arguments must be an object, got {kind(arguments)}; write {_FORM}"
        return [broken(problem, name=name)], end
    return [ToolCall(name=name, arguments=arguments)], end


def _read_list(text: str, position: int) -> tuple[list[ToolCall], int]:
    """Read the objects of a list, whose closing bracket may be missing at the end of the turn."""
    calls: list[ToolCall] = []
    while True:
        position = skip_space(text, position)
        if text.startswith("]", position):
            return calls, position + 1
        call, position = _read_object(text, position)
        calls.append(call)
        position = skip_space(text, position)
        if text.startswith(",", position):
            position += 1
        elif not text.startswith("]", position):
            if position < len(text) and call.error is None:
                problem = f"the list of tool calls is not closed; write {_FORM}"
                calls.append(broken(problem))
            return calls, _next_marker(text, position)


def _read_object(text: str, start: int) -> tuple[ToolCall, int]:
    try:
        value, end = read_json(text, start)
    except ValueError as error:
        problem = f"the tool call is no valid JSON ({error}); write {_FORM}"
        return broken(problem), _next_marker(text, start)
    return _CALL.call(value), end


def _next_marker(text: str, position: int) -> int:
    found = text.find(_MARKER, position)
    return len(text) if found < 0 else found
