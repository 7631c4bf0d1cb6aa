"""The XML format of Qwen3-Coder and Qwen 3.5.

::

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import re

from agentrl.tool.parsers.base import (
    NO_CONTEXT,
    ParsedTurn,
    TurnContext,
    broken,
    skip_space,
)
from agentrl.tool.parsers.scanner import Marker, Scanner
from agentrl.tool.parsers.tagged import TaggedArguments, Tags
from agentrl.tool.parsers.typed_text import ParameterTypes
from agentrl.types import ToolCall

_OPEN, _CLOSE, _FUNCTION_CLOSE = "<tool_call>", "</tool_call>", "</function>"
_FORM = (
    "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, "
    "each tag on a line of its own"
)
_BARE = "<function="
_FUNCTION = re.compile(r"<function=([^<>\n]{1,200})>")
_ARGUMENTS = TaggedArguments(
    Tags(
        open=re.compile(r"<parameter=([^<>\n]{1,200})>"),
        close="</parameter>",
        implied=r"\n(?=<parameter=|</function>)",
        ends=(_FUNCTION_CLOSE, _CLOSE),
        block_end=_CLOSE,
    ),
    trim="both",
)
_CLOSES = re.compile(_CLOSE)
_SCANNER = Scanner(f"{_OPEN}|^[ \\t]*{_BARE}(?=[^<>\\n]{{1,200}}>)")


class Qwen3CoderParser:
    """Parses ``<function=...>`` in ``<tool_call>`` tags; values are typed by the tool's schema.

    These models at times leave ``<tool_call>`` out: ``<function=...>`` at the start of a line
    outside a code fence will do. A value ends at ``</parameter>``, and holds no such text.
    """

    stop_tokens: tuple[str, ...] = ()

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, lambda marker: _read(marker, context), context)


def _read(marker: Marker, context: TurnContext) -> tuple[list[ToolCall], int] | None:
    is_bare = marker.match["marker"] != _OPEN
    if is_bare and marker.in_fence:
        return None
    text = marker.text
    begin = marker.end - len(_BARE) if is_bare else marker.end
    start = position = skip_space(text, begin)
    calls: list[ToolCall] = []
    while (opened := _FUNCTION.match(text, position)) is not None:
        name = opened[1].strip().strip("\"'")
        types = ParameterTypes(schema=context.parameters.get(name, {}))
        try:
            arguments, position = _ARGUMENTS.read(marker, opened.end(), types)
        except ValueError as error:
            problem = f"the tool call is broken: {error}; write {_FORM}"
            return [*calls, broken(problem, name=name)], marker.after(_CLOSES, start)
        calls.append(ToolCall(name=name, arguments=arguments))
        if text.startswith(_FUNCTION_CLOSE, position):
            position = skip_space(text, position + len(_FUNCTION_CLOSE))
    if text.startswith(_CLOSE, position):
        position += len(_CLOSE)
    elif not calls or not (is_bare or position == len(text) or text.startswith(_OPEN, position)):
        problem = "other text follows the call" if calls else "<function=name> does not follow"
        call = broken(f"the tool call is broken: {problem}; write {_FORM}")
        return [*calls, call], marker.after(_CLOSES, position)
    if not calls:
        return [broken(f"the tool call is empty; write {_FORM}")], position
    return calls, position
