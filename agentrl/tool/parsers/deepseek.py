"""The formats of DeepSeek: V3, R1 and V3-0324; and V3.1.

V3 writes a type, a name and JSON in a code fence between its control tokens, V3.1 just name and
JSON. Each call stands between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``, all of them
between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``.
"""

from __future__ import annotations

import re

from agentrl.tool.parsers.base import (
    NO_CONTEXT,
    ParsedTurn,
    TurnContext,
    broken,
    read_arguments,
    skip_space,
)
from agentrl.tool.parsers.scanner import Marker, Scanner
from agentrl.types import ToolCall

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_ENDS = (_END, _BEGIN, _ALL_END)
_TYPE = "function"
_FORM_V3 = f"{_BEGIN}{_TYPE}{_SEPARATOR}name\n```json\n{{...}}\n```{_END}"
_FORM_V31 = f"{_BEGIN}name{_SEPARATOR}{{...}}{_END}"
_HEAD = re.compile(f'\\s*([^\\s<>{{}}"`]{{1,200}})\\s*{re.escape(_SEPARATOR)}')
_NAME = re.compile(r"[ \t]*([^\s<>{}\"`]{1,200})\s*(?=```|\{)")
_ENDING = re.compile(re.escape(_END))
_SCANNER = Scanner("|".join(map(re.escape, (_ALL_BEGIN, _BEGIN, _ALL_END))))


class DeepSeekParser:
    """Parses both formats, told apart call by call: V3 has a name after the separator."""

    stop_tokens: tuple[str, ...] = ()

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, _read, context)


def _read(marker: Marker) -> tuple[list[ToolCall], int]:
    text, start = marker.text, marker.end
    if marker.match["marker"] != _BEGIN:
        return [], start
    head = _HEAD.match(text, start)
    position = start if head is None else skip_space(text, head.end())
    if head is None or (head[1] == _TYPE and text.startswith("```", position)):
        problem = f"the tool call has no name, or no {_SEPARATOR}; write {_FORM_V31}"
        return [broken(problem)], marker.after(_ENDING, start)
    name, form = head[1], _FORM_V31
    if name == _TYPE and (named := _NAME.match(text, position)) is not None:
        name, form, position = named[1], _FORM_V3, named.end()
    try:
        arguments, end = read_arguments(text, position, _ENDS)
    except ValueError as error:
        problem = f"the arguments are no valid JSON ({error}); write {form}"
        return [broken(problem, name=name)], marker.after(_ENDING, start)
    is_closed = text.startswith(_END, end)
    return [ToolCall(name=name, arguments=arguments)], end + len(_END) if is_closed else end
