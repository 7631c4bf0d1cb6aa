"""Which tool-call parser reads what a chat template writes."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.agent.renderer import PROBE_TOOL, Renderer
from agentrl.agent.template import ToolSchema
from agentrl.errors import ConfigError, RenderError
from agentrl.tool.parsers import (
    FORMATS,
    NO_CALLS,
    ToolCallParser,
    TurnContext,
    make_parser,
    parser_registry,
)
from agentrl.types import Message, ToolCall

_CALL = ToolCall(name=PROBE_TOOL["function"]["name"], arguments={"text": "two words", "number": 3})
_SHOWN_CHARS = 200
_OPENED_THOUGHTS = ("<think>", "[THINK]")


def choose_parser(
    renderer: Renderer, tools: Sequence[ToolSchema], name: str | None = None
) -> ToolCallParser:
    """Return the parser ``name``, or the one that reads the calls which the template writes.

    Args:
        renderer: of the model's tokenizer.
        tools: what the model may call; without any, a template that writes no known calls will do.
        name: None chooses.

    Raises:
        ConfigError: no parser, or more than one, reads what the template writes; or ``name`` does
            not, and another one does.
        RegistryError: there is no parser ``name``.
    """
    written = _written_call(renderer)
    matching = [known for known in FORMATS if _reads(make_parser(known), written)]
    if name is not None:
        parser = make_parser(name)
        if tools and name in (*FORMATS, NO_CALLS) and matching and name not in matching:
            raise ConfigError(
                f"model.tool_parser={name!r} does not read what the chat template writes for a "
                f"call, {_clip(written)!r}, and {matching[0]!r} does: leave model.tool_parser "
                "unset, or set model.chat_template to the one that the model was trained with"
            )
        return parser
    if len(matching) == 1:
        return make_parser(matching[0])
    if not tools:
        return make_parser(NO_CALLS)
    shown = (
        f"writes a call as {_clip(written)!r}, which {' and '.join(matching) or 'no parser'} reads"
        if written
        else "does not show the calls of assistant messages"
    )
    raise ConfigError(
        f"model.tool_parser is not set, and the chat template {shown}: set it to the format that "
        f"the model was trained with, one of {', '.join(parser_registry.names())}, or "
        "'./file.py:Parser'"
    )


def stop_token_ids(renderer: Renderer, parser: ToolCallParser) -> tuple[int, ...]:
    """Return what ends a turn: the tokens of the template, and those of the parser's format."""
    controls = renderer.codec.control_tokens
    known = [controls[token] for token in parser.stop_tokens if token in controls]
    return tuple(dict.fromkeys((*renderer.stop_token_ids, *known)))


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends inside a thought, which the template opened for the model."""
    return prompt[-64:].rstrip().endswith(_OPENED_THOUGHTS)


def _written_call(renderer: Renderer) -> str:
    """Return what the template writes for a call, without the stop token; empty where nothing."""
    function = {"name": _CALL.name, "arguments": _CALL.arguments}
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    try:
        return renderer.encode_answer(message, [PROBE_TOOL])[1]
    except RenderError:
        return ""


def _reads(parser: ToolCallParser, written: str) -> bool:
    turn = parser.parse(written, TurnContext.of([PROBE_TOOL]))
    return turn.tool_calls == (_CALL,)


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
