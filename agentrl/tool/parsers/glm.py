"""The format of GLM 4.5 to 4.7.

GLM 4.5 and 4.6 write each tag on a line of its own, GLM 4.7 all in one::

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>
"""

from __future__ import annotations

import re

from agentrl.tool.parsers.base import NO_CONTEXT, ParsedTurn, TurnContext, broken
from agentrl.tool.parsers.scanner import Marker, Scanner
from agentrl.tool.parsers.tagged import TaggedArguments, Tags
from agentrl.tool.parsers.typed_text import ParameterTypes
from agentrl.types import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FORM = "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"
_NAME = re.compile(r"\s*([^\s<>{}\"'\\]{1,200})")
_GAP = r"(?:\s|\\n)*"
_ARGUMENTS = TaggedArguments(
    Tags(
        open=re.compile(f"<arg_key>([^<>\\n]{{1,200}})</arg_key>{_GAP}<arg_value>"),
        close="</arg_value>",
        implied="",
        ends=(_CLOSE, _OPEN),
        block_end=_CLOSE,
        gap=re.compile(_GAP),
    ),
    trim="none",
)
_CLOSES = re.compile(_CLOSE)
_SCANNER = Scanner(_OPEN)


class GlmParser:
    """Parses ``<arg_key>`` and ``<arg_value>`` pairs; values are typed by the tool's schema.

    All but strings are JSON. Where the schema does not say, a value that is JSON is taken for it.
    GLM has no token that closes an answer: the next role's token ends its turn.
    """

    stop_tokens: tuple[str, ...] = ("<|observation|>", "<|user|>", "<|endoftext|>")

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, lambda marker: _read(marker, context), context)


def _read(marker: Marker, context: TurnContext) -> tuple[list[ToolCall], int]:
    text, start = marker.text, marker.end
    opened = _NAME.match(text, start)
    if opened is None:
        problem = f"the tool call is broken: no name follows {_OPEN}; write {_FORM}"
        return [broken(problem)], marker.after(_CLOSES, start)
    name = opened[1]
    types = ParameterTypes(schema=context.parameters.get(name, {}), guess_json=True)
    try:
        arguments, end = _ARGUMENTS.read(marker, opened.end(), types)
    except ValueError as error:
        problem = f"the tool call is broken: {error}; write {_FORM}"
        return [broken(problem, name=name)], marker.after(_CLOSES, start)
    is_closed = text.startswith(_CLOSE, end)
    return [ToolCall(name=name, arguments=arguments)], end + len(_CLOSE) if is_closed else end
