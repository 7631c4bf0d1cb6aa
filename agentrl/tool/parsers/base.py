"""What a tool-call parser is, and what all of them share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.tool.parsers.strict_json import kind, read_json
from agentrl.types import ToolCall

_SPACE = re.compile(r"[ \t\r\n]*")
_FENCE = re.compile(r"```(?:json)?[ \t\r\n]*")


@dataclass(slots=True, frozen=True, kw_only=True)
class ParsedTurn:
    """What a turn says."""

    content: str
    """The text outside the calls."""
    tool_calls: tuple[ToolCall, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class TurnContext:
    """What a parser may know of a turn beside its text."""

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schema of the parameters, by name of the tool: formats that write values as plain text
    need it to tell ``5`` from ``"5"``."""
    in_thought: bool = False
    """Whether the prompt ended inside a thought (the template itself wrote ``<think>``)."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], *, in_thought: bool = False) -> TurnContext:
        """Return the context of a turn that may call ``tools``, given in OpenAI form."""
        functions = [tool["function"] for tool in tools]
        parameters = {f["name"]: f.get("parameters") or {} for f in functions}
        return cls(parameters=parameters, in_thought=in_thought)


NO_CONTEXT = TurnContext()


class ToolCallParser(Protocol):
    """Finds the tool calls in the text of a turn."""

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """Control tokens that end a turn, beside the one that closes answers in the template.

        Those that a tokenizer lacks are passed over.
        """
        ...

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises: a broken call is a ToolCall with ``error`` set.

        Args:
            text: the turn without its stop token, control tokens spelled out.
            context: the tools on offer, and how the prompt ended.
        """
        ...


def broken(error: str, *, name: str = "") -> ToolCall:
    """Return a call that is not run; the model reads ``error``."""
    return ToolCall(name=name, arguments={}, error=error)


def skip_space(text: str, position: int) -> int:
    """Return the offset of the first character from ``position`` on that is no white space."""
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def read_value(text: str, start: int, ends: tuple[str, ...]) -> tuple[Any, int]:
    """Parse the JSON value at ``start``, in a code fence or not, that one of ``ends`` follows.

    The end of the text will do as well: there the stop token stood.

    Returns:
        The value, and the offset of what follows it.

    Raises:
        ValueError: with a message for the model.
    """
    position = skip_space(text, start)
    fence = _FENCE.match(text, position)
    value, end = read_json(text, position if fence is None else fence.end())
    end = skip_space(text, end)
    if fence is not None and text.startswith("```", end):
        end = skip_space(text, end + 3)
    if end < len(text) and not text.startswith(ends, end):
        raise ValueError("text follows the object")
    return value, end


def read_arguments(text: str, start: int, ends: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """Parse the arguments at ``start``, a JSON object that one of ``ends`` follows.

    Returns:
        The arguments, and the offset of what follows them.

    Raises:
        ValueError: with a message for the model.
    """
    value, end = read_value(text, start, ends)
    if not isinstance(value, dict):
        raise ValueError(f"they must be an object, got {kind(value)}")
    return value, end


@dataclass(slots=True, frozen=True, kw_only=True)
class CallObject:
    """A call written as one JSON object."""

    form: str
    """How it is written, for the model."""
    arguments: tuple[str, ...] = ("arguments",)
    """Keys that may hold the arguments."""
    ignored: tuple[str, ...] = ()
    """Keys that models of this format add and that mean nothing here."""
    takes_text: bool = False
    """Whether arguments may be a string that holds the JSON object."""

    def call(self, value: Any) -> ToolCall:
        """Return the call that ``value`` is; broken where it is none."""
        if not isinstance(value, dict):
            return broken(f"a tool call is an object, got {kind(value)}; write {self.form}")
        name = value.get("name")
        if not isinstance(name, str) or not name:
            return broken(f"the tool call has no name; write {self.form}")
        allowed = ("name", *self.arguments, *self.ignored)
        surplus = [key for key in value if key not in allowed]
        given = [key for key in self.arguments if key in value]
        if surplus or len(given) > 1:
            key = (surplus or given)[-1][:40]
            problem = f"has no {key!r}" if surplus else f"holds its arguments once, not in {key!r}"
            return broken(f"a tool call {problem}; write {self.form}", name=name)
        arguments = value[given[0]] if given else {}
        if self.takes_text and isinstance(arguments, str):
            try:
                arguments, _ = read_value(arguments, 0, ())
            except ValueError as error:
                return broken(
                    f"arguments are no valid JSON ({error}); write {self.form}", name=name
                )
        if not isinstance(arguments, dict):
            return broken(
                f"arguments must be an object, got {kind(arguments)}; write {self.form}", name=name
            )
        return ToolCall(name=name, arguments=arguments)
