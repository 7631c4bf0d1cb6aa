"""The format of Kimi K2: ``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}``.

Calls end with ``<|tool_call_end|>`` and stand between ``<|tool_calls_section_begin|>`` and
``<|tool_calls_section_end|>``.
"""

from __future__ import annotations

import re

from agentrl.tool.parsers.base import (
    NO_CONTEXT,
    ParsedTurn,
    TurnContext,
    broken,
    read_arguments,
)
from agentrl.tool.parsers.scanner import Marker, Scanner
from agentrl.types import ToolCall

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ENDS = (_END, _BEGIN, _SECTION[1])
_FORM = f"{_BEGIN}functions.name:0{_ARGUMENTS}{{...}}{_END}"
_HEAD = re.compile(f'\\s*([^\\s<>{{}}"]{{1,200}})\\s*{re.escape(_ARGUMENTS)}')
_NAMESPACE = "functions."
_INDEX = re.compile(r":\d+$")
_ENDING = re.compile(re.escape(_END))
_SCANNER = Scanner("|".join(map(re.escape, (_BEGIN, *_SECTION))))


class KimiK2Parser:
    """Parses calls whose id names the function; the section tokens may be missing."""

    stop_tokens: tuple[str, ...] = ()

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, _read, context)


def _read(marker: Marker) -> tuple[list[ToolCall], int]:
    text, start = marker.text, marker.end
    if marker.match["marker"] != _BEGIN:
        return [], start
    head = _HEAD.match(text, start)
    name = "" if head is None else _INDEX.sub("", head[1].removeprefix(_NAMESPACE))
    if head is None or not name or name.isdigit():
        problem = f"the tool call does not name its function; write {_FORM}"
        return [broken(problem)], marker.after(_ENDING, start)
    try:
        arguments, end = read_arguments(text, head.end(), _ENDS)
    except ValueError as error:
        problem = f"the arguments are no valid JSON ({error}); write {_FORM}"
        return [broken(problem, name=name)], marker.after(_ENDING, start)
    is_closed = text.startswith(_END, end)
    return [ToolCall(name=name, arguments=arguments)], end + len(_END) if is_closed else end
