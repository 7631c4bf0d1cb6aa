"""Conversations to learn from: read, encoded, shuffled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from agentrl.agent.renderer import Renderer
from agentrl.agent.template import ToolSchema
from agentrl.batch import Batch
from agentrl.errors import DataError, RenderError
from agentrl.types import Message

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatExample:
    """A conversation, and the tools that the model was told of."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    source: str = ""
    """Where it comes from, for messages of errors."""


@dataclass(slots=True, frozen=True, kw_only=True)
class EncodedExample:
    """A conversation as tokens, both of length T; the mask is True on what assistants said."""

    ids: list[int]
    loss_mask: list[bool]


@dataclass(slots=True, kw_only=True)
class EncodedExamples:
    """What supervised training learns from."""

    examples: list[EncodedExample] = field(default_factory=list)
    num_too_long: int = 0
    """Conversations left out because they are longer than the limit."""


def load_conversations(path: Path) -> list[ChatExample]:
    """Read a JSONL file: ``{"messages": [{"role", "content", ...}], "tools": [...]}`` a line.

    ``tools`` is optional. Blank lines are skipped.

    Raises:
        DataError: the file cannot be read, is empty, or a line is not of this form; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read conversations from {str(path)!r}: {error}") from error
    examples = [
        _parse_line(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not examples:
        raise DataError(f"{str(path)!r} holds no conversations; write one JSON object a line")
    return examples


def check_messages(value: Any, source: str) -> list[Message]:
    """Return ``value`` as messages.

    Raises:
        DataError: no list of messages with a known role and text, or nothing from an assistant.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{source}: messages must be a list that is not empty, got {_short(value)}")
    for index, message in enumerate(value):
        where = f"{source}, message {index}"
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: must be a mapping, got {_short(message)}")
        role = message.get("role")
        if role not in _ROLES:
            raise DataError(f"{where}: role must be one of {', '.join(_ROLES)}, got {_short(role)}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"{where}: content must be text, got {_short(message.get('content'))}")
    if not any(message["role"] == "assistant" for message in value):
        raise DataError(f"{source}: no assistant message, so there is nothing to learn")
    return [cast(Message, message) for message in value]


def encode_examples(
    renderer: Renderer, examples: Sequence[ChatExample], *, max_tokens: int
) -> EncodedExamples:
    """Render conversations to tokens; those beyond ``max_tokens`` are left out and counted.

    Raises:
        RenderError: the chat template cannot show a conversation; names it.
        DataError: nothing is left.
    """
    encoded = EncodedExamples()
    for example in examples:
        try:
            ids, loss_mask = renderer.render_conversation(example.messages, example.tools)
        except RenderError as error:
            raise RenderError(f"{example.source or 'a conversation'}: {error}") from error
        if len(ids) > max_tokens:
            encoded.num_too_long += 1
        else:
            encoded.examples.append(EncodedExample(ids=ids, loss_mask=loss_mask))
    if not encoded.examples:
        raise DataError(
            f"none of {len(examples)} conversations is at most {max_tokens} tokens long; raise "
            "max_tokens, or give shorter ones"
        )
    return encoded


def endless(examples: Sequence[EncodedExample], *, seed: int) -> Iterator[EncodedExample]:
    """Yield the examples over and over, every pass in another order that ``seed`` decides."""
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(examples)):
            yield examples[index]


def to_batch(examples: Sequence[EncodedExample]) -> Batch:
    """Pack examples, every assistant token with the same weight.

    The token fields are ``ids``, ``loss_mask`` and ``loss_weights`` (sums to 1).
    """
    batch = Batch.from_rows(
        {
            "ids": [torch.tensor(example.ids, dtype=torch.int64) for example in examples],
            "loss_mask": [
                torch.tensor(example.loss_mask, dtype=torch.bool) for example in examples
            ],
        }
    )
    mask = batch.tokens["loss_mask"]
    batch.tokens["loss_weights"] = mask.float() / mask.sum().clamp(min=1)
    return batch


def _parse_line(line: str, source: str) -> ChatExample:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{source}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{source}: must be an object with 'messages', got {_short(row)}")
    unknown = sorted(row.keys() - {"messages", "tools"})
    if unknown:
        raise DataError(f"{source}: unknown keys {unknown}; known are 'messages' and 'tools'")
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{source}: tools must be a list of schemas, got {_short(tools)}")
    return ChatExample(
        messages=check_messages(row.get("messages"), source), tools=tools, source=source
    )


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
