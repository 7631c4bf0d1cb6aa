"""Between chat messages and what environments, tools and scripted policies exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from agentrl.env.base import Observation, ScriptedTurn
from agentrl.types import Action, Message, ToolCall, ToolResult

_KEYS = ("role", "content", "tool_calls", "name")


def as_messages(observation: Observation) -> list[Message]:
    """Return an observation as messages: text is what a user says, empty text is nothing."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return [
        cast(Message, {key: value for key, value in message.items() if key in _KEYS})
        for message in observation
    ]


def answer_message(action: Action) -> Message:
    """Return the assistant message of a turn.

    A turn with a broken call is kept as plain text: the call could not be rendered as a call.
    """
    calls = action.tool_calls
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": action.text}
    return {
        "role": "assistant",
        "content": action.content,
        "tool_calls": [call_message(call) for call in calls],
    }


def scripted_message(turn: ScriptedTurn) -> Message:
    """Return the assistant message of a scripted turn."""
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [call_message(call) for call in turn.tool_calls]
    return message


def call_message(call: ToolCall) -> dict[str, Any]:
    """Return a call in the form that chat templates take."""
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def tool_messages(results: Sequence[ToolResult]) -> Iterable[Message]:
    """Yield one message for every answer of a tool."""
    for result in results:
        yield {"role": "tool", "content": result.content, "name": result.name}
