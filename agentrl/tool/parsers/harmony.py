"""The Harmony format of gpt-oss: messages in channels.

A turn goes on after ``<|start|>assistant``, and may hold several messages::

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
    to=functions.name <|constrain|>json<|message|>{...}<|call|>

A turn ends with ``<|call|>`` or ``<|return|>``, never with ``<|end|>``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.tool.parsers.base import (
    NO_CONTEXT,
    ParsedTurn,
    TurnContext,
    broken,
    read_arguments,
)
from agentrl.types import ToolCall

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|call|>", "<|end|>", "<|return|>", _START)
_FORM = "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>"
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_ROLE = re.compile(r"\s*([\w.]+)")
_NAMESPACE = "functions."
_THOUGHTS = "analysis"


@dataclass(slots=True, frozen=True)
class _Header:
    """What stands before a message."""

    role: str
    channel: str
    recipient: str


class HarmonyParser:
    """Parses messages to ``functions.name`` outside the analysis channel.

    Content is what stands in the other channels. What the model thought is no part of it.
    """

    stop_tokens: tuple[str, ...] = ("<|call|>", "<|return|>")

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        contents: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        found = text.find(_MESSAGE)
        if found < 0:
            return ParsedTurn(content=text, tool_calls=())
        while found >= 0:
            header = _header(text[position:found], is_first=position == 0)
            start = found + len(_MESSAGE)
            name = _function(header)
            if name is not None and header.role == "assistant":
                call, position = _read_call(text, start, name, header)
                calls.append(call)
            else:
                end = _END.search(text, start)
                position = len(text) if end is None else end.start()
                if header.role == "assistant" and header.channel != _THOUGHTS:
                    contents.append(text[start:position])
            found = text.find(_MESSAGE, position)
        return ParsedTurn(content="\n".join(contents), tool_calls=tuple(calls))


def _header(text: str, *, is_first: bool) -> _Header:
    _, started, rest = text.rpartition(_START)
    role = "assistant" if is_first else ""  # the prompt began the first one
    if started:
        said = _ROLE.match(rest)
        role = "" if said is None else said[1]
    channel, recipient = _CHANNEL.search(rest), _RECIPIENT.search(rest)
    return _Header(
        role=role,
        channel="" if channel is None else channel[1],
        recipient="" if recipient is None else recipient[1],
    )


def _function(header: _Header) -> str | None:
    """Return the function that a message calls, by the name that the model gave it."""
    recipient = header.recipient
    if recipient in ("", "assistant", "user", "all"):
        return None
    return recipient.removeprefix(_NAMESPACE)


def _read_call(text: str, start: int, name: str, header: _Header) -> tuple[ToolCall, int]:
    problem = f"no call is run from the {_THOUGHTS} channel"
    if not name:
        problem = "the tool call does not name its function"
    elif header.channel != _THOUGHTS:
        try:
            arguments, position = read_arguments(text, start, _ENDS)
            return ToolCall(name=name, arguments=arguments), position
        except ValueError as error:
            problem = f"the arguments are no valid JSON ({error})"
    end = _END.search(text, start)
    call = broken(f"{problem}; write {_FORM}", name=name)
    return call, len(text) if end is None else end.start()
