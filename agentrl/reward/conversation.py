"""What graders read of an episode: the model's own words, and the conversation as text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.env.base import Episode
from agentrl.reward.config import Solution
from agentrl.types import Message

_INDENT = "\n    "


def said_by_model(episode: Episode) -> list[str]:
    """Return what the model said outside tool calls, one text a turn.

    Assistant messages that the environment's reset brought along (examples) are not the model's.
    """
    answers = [m["content"] for m in episode.messages if m["role"] == "assistant"]
    return answers[max(len(answers) - len(episode.turns), 0) :]


def solution_text(episode: Episode, solution: Solution) -> str:
    """Return the text that is graded; empty where the model said nothing."""
    said = said_by_model(episode)
    if solution is Solution.all_turns:
        return "\n".join(said)
    return said[-1] if said else ""


def question_text(episode: Episode) -> str:
    """Return the first user message."""
    return next((m["content"] for m in episode.messages if m["role"] == "user"), "")


def transcript(messages: Sequence[Message]) -> str:
    """Return a conversation as text, one ``role: content`` paragraph a message.

    The lines of a message below its first are indented, so that nothing said in a message can pass
    for another message or for a marker around the conversation: those start a line.
    """
    return "\n\n".join(
        f"{message['role']}: {_INDENT.join(_content(message).splitlines())}" for message in messages
    )


def _content(message: Message) -> str:
    calls = [
        json.dumps(call["function"], ensure_ascii=False, default=str)
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join([message["content"], *calls] if message["content"] or not calls else calls)
