"""The formats of MiniMax-M1 and MiniMax-M2.

M1 writes JSON, one call a line: ``<tool_calls>{"name": ..., "arguments": {...}}</tool_calls>``.
M2 writes tags::

    <minimax:tool_call>
    <invoke name="name">
    <parameter name="key">value</parameter>
    </invoke>
    </minimax:tool_call>
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
from agentrl.tool.parsers.strict_json import read_json
from agentrl.tool.parsers.tagged import TaggedArguments, Tags
from agentrl.tool.parsers.typed_text import ParameterTypes
from agentrl.types import ToolCall

_M1_OPEN, _M1_CLOSE = "<tool_calls>", "</tool_calls>"
_M1_CALL = CallObject(
    form='<tool_calls>{"name": "...", "arguments": {...}}</tool_calls>', takes_text=True
)
_OPEN, _CLOSE, _INVOKE_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>", "</invoke>"
_FORM = (
    '<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke>'
    "</minimax:tool_call>"
)
_INVOKE = re.compile(r"<invoke name=[\"']?([^<>\"'\n]{1,200})[\"']?>")
_ARGUMENTS = TaggedArguments(
    Tags(
        open=re.compile(r"<parameter name=[\"']?([^<>\"'\n]{1,200})[\"']?>"),
        close="</parameter>",
        implied=r"\n(?=<parameter name=|</invoke>)",
        ends=(_INVOKE_CLOSE, _CLOSE),
        block_end=_CLOSE,
    ),
    trim="pair",
)
_CLOSES, _M1_CLOSES = re.compile(_CLOSE), re.compile(_M1_CLOSE)
_SCANNER = Scanner(f"{_OPEN}|{_M1_OPEN}")


class MinimaxParser:
    """Parses both formats; values of M2 are typed by the tool's schema."""

    stop_tokens: tuple[str, ...] = ()

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, lambda marker: _read(marker, context), context)


def _read(marker: Marker, context: TurnContext) -> tuple[list[ToolCall], int]:
    position = skip_space(marker.text, marker.end)
    if marker.match["marker"] == _M1_OPEN:
        return _read_lines(marker, position)
    return _read_invokes(marker, position, context)


def _read_lines(marker: Marker, start: int) -> tuple[list[ToolCall], int]:
    calls: list[ToolCall] = []
    text, position = marker.text, start
    while position < len(text) and not text.startswith(_M1_CLOSE, position):
        try:
            value, end = read_json(text, position)
        except ValueError as error:
            problem = f"the tool call is no valid JSON ({error}); write {_M1_CALL.form}"
            return [*calls, broken(problem)], marker.after(_M1_CLOSES, position)
        calls.append(_M1_CALL.call(value))
        position = skip_space(text, end)
    if not calls:
        calls = [broken(f"the tool call is empty; write {_M1_CALL.form}")]
    return calls, min(position + len(_M1_CLOSE), len(text))


def _read_invokes(marker: Marker, start: int, context: TurnContext) -> tuple[list[ToolCall], int]:
    calls: list[ToolCall] = []
    text, position = marker.text, start
    while (opened := _INVOKE.match(text, position)) is not None:
        name = opened[1].strip()
        types = ParameterTypes(schema=context.parameters.get(name, {}))
        try:
            arguments, position = _ARGUMENTS.read(marker, opened.end(), types)
        except ValueError as error:
            problem = f"the tool call is broken: {error}; write {_FORM}"
            return [*calls, broken(problem, name=name)], marker.after(_CLOSES, start)
        calls.append(ToolCall(name=name, arguments=arguments))
        if text.startswith(_INVOKE_CLOSE, position):
            position = skip_space(text, position + len(_INVOKE_CLOSE))
    if not calls or not (position == len(text) or text.startswith(_CLOSE, position)):
        problem = "other text follows the call" if calls else '<invoke name="..."> does not follow'
        call = broken(f"the tool call is broken: {problem}; write {_FORM}")
        return [*calls, call], marker.after(_CLOSES, position)
    return calls, min(position + len(_CLOSE), len(text))
