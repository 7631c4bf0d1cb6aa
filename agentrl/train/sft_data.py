"""Conversations to learn from: read, checked, encoded, shuffled."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch

from agentrl.agent.renderer import Renderer
from agentrl.agent.template import ToolSchema
from agentrl.batch import Batch
from agentrl.data.source import read_source
from agentrl.data.table import Row, Table, show
from agentrl.errors import DataError, RenderError
from agentrl.train.sft_config import Turns
from agentrl.types import Message

_ROLES = ("system", "user", "assistant", "tool")
_WEIGHT = "weight"


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatExample:
    """A conversation, and the tools that the model was told of."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    weights: tuple[bool, ...] | None = None
    """Of the assistant's messages, in their order: whether it is learned. None: all are."""
    source: str = ""
    """Where it comes from, for messages of errors."""


@dataclass(slots=True, frozen=True, kw_only=True)
class EncodedExample:
    """A conversation as tokens, both of length T; the mask is True on what is learned."""

    ids: list[int]
    loss_mask: list[bool]


@dataclass(slots=True, kw_only=True)
class EncodedExamples:
    """What supervised training learns from."""

    examples: list[EncodedExample] = field(default_factory=list)
    num_too_long: int = 0
    """Conversations left out because they are longer than the limit."""

    def digest(self) -> str:
        """Return a hash of every token and its mask, in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            digest.update(np.asarray(example.ids, np.int64).tobytes())
            digest.update(np.asarray(example.loss_mask, np.bool_).tobytes() + b"|")
        return digest.hexdigest()


@dataclass(slots=True, frozen=True, kw_only=True)
class ConversationColumns:
    """Which column of a file is what."""

    messages: str = "messages"
    tools: str = "tools"


def load_conversations(
    source: str, *, key: str = "--data", columns: ConversationColumns | None = None
) -> list[ChatExample]:
    """Read conversations from whatever ``data.train`` reads; see docs/data.md.

    A row holds ``messages``, and may hold ``tools``; other columns are not read. An assistant's
    message may say ``"weight": 0``: it is context then, and not learned.

    Args:
        key: names the source in messages.

    Raises:
        DataError: there is no such source, it is empty, or a row is not of this form; names file,
            row and column.
    """
    columns = columns or ConversationColumns()
    try:
        tables = read_source(source, split="train")
    except DataError as error:
        raise DataError(str(error).replace("data.train", key)) from error
    if not any(len(table.rows) for table in tables):
        names = ", ".join(table.name for table in tables)
        raise DataError(f"{key}: {names} holds no conversations; write one JSON object a line")
    return [
        _example(row, columns, table, index)
        for table in tables
        for index, row in enumerate(table.rows)
    ]


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
        if any("\ud800" <= char <= "\udfff" for char in message["content"]):
            raise DataError(
                f"{where}: content holds half of a surrogate pair, {show(message['content'])}, "
                "which is no text; write the whole character"
            )
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise DataError(f"{where}: tool_calls must be a list, got {_short(calls)}")
    if not any(message["role"] == "assistant" for message in value):
        raise DataError(f"{source}: no assistant message, so there is nothing to learn")
    return [cast(Message, message) for message in value]


def encode_examples(
    renderer: Renderer,
    examples: Sequence[ChatExample],
    *,
    max_tokens: int,
    turns: Turns = Turns.all,
) -> EncodedExamples:
    """Render conversations to tokens; those beyond ``max_tokens`` are left out and counted.

    Raises:
        RenderError: the chat template cannot show a conversation; names it.
        DataError: nothing is left, or nothing of a conversation is learned; names it.
    """
    encoded = EncodedExamples()
    for example in examples:
        try:
            ids, spoken = renderer.render_conversation(example.messages, example.tools)
            loss_mask = _learned(spoken, example, turns)
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


def endless(
    examples: Sequence[EncodedExample], *, seed: int, start: int = 0
) -> Iterator[EncodedExample]:
    """Yield the examples over and over, every pass in another order that ``seed`` decides.

    Args:
        start: examples that were drawn before.
    """
    rng = np.random.default_rng(seed)
    drawn = 0
    while True:
        for index in rng.permutation(len(examples)):
            if drawn >= start:
                yield examples[index]
            drawn += 1


def to_batch(examples: Sequence[EncodedExample]) -> Batch:
    """Pack examples, every learned token with the same weight.

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


def _learned(spoken: Sequence[bool], example: ChatExample, turns: Turns) -> list[bool]:
    """Return the mask of what is learned, out of what assistants said.

    A turn is a run of spoken tokens: whatever follows one begins with a header.
    """
    runs = [(said, len(list(run))) for said, run in groupby(spoken)]
    num_turns = sum(said for said, _ in runs)
    weights = list(example.weights or [True] * num_turns)
    if len(weights) != num_turns:
        raise RenderError(
            f"{len(weights)} messages of the assistant became {num_turns} turns; two that follow "
            "each other have to be one message"
        )
    if turns is Turns.last:
        weights[:-1] = [False] * (num_turns - 1)
    if not any(weights):
        raise DataError(
            f"{example.source or 'a conversation'}: no turn of it is learned (turns={turns}, "
            f"{_WEIGHT} {[int(weight) for weight in example.weights or ()]}); leave it out"
        )
    turn = iter(weights)
    return [learned for said, count in runs for learned in [bool(said and next(turn))] * count]


def _example(row: Row, columns: ConversationColumns, table: Table, index: int) -> ChatExample:
    source = table.place(index)
    if columns.messages not in row:
        raise DataError(_no_messages(row, columns.messages, source))
    near = difflib.get_close_matches(columns.tools, [k for k in row if k != columns.tools], n=1)
    if columns.tools not in row and near:
        raise DataError(
            f"{source}: there is no column {columns.tools!r}; if {near[0]!r} holds the schemas of "
            f"tools, set tools_column={near[0]}, else rename it"
        )
    checked = check_messages(
        _plain(row[columns.messages]), f"{source}, column {columns.messages!r}"
    )
    return ChatExample(
        messages=[_without_weight(message) for message in checked],
        tools=_tools(row.get(columns.tools), f"{source}, column {columns.tools!r}"),
        weights=_weights(checked, source),
        source=source,
    )


def _no_messages(row: Row, wanted: str, source: str) -> str:
    near = difflib.get_close_matches(wanted, row, n=1)
    hint = f"; did you mean messages_column={near[0]}?" if near else ""
    return f"{source}: there is no column {wanted!r}, only {', '.join(map(repr, row))}{hint}"


def _plain(messages: Any) -> Any:
    """Leave out fields without a value, which tables give every message; a call needs no text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages
    found: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping):
            message = {name: value for name, value in message.items() if value is not None}
            if message.get("tool_calls"):
                message.setdefault("content", "")
        found.append(message)
    return found


def _without_weight(message: Message) -> Message:
    return cast(Message, {name: value for name, value in message.items() if name != _WEIGHT})


def _weights(messages: Sequence[Mapping[str, Any]], source: str) -> tuple[bool, ...]:
    found = []
    for index, message in enumerate(messages):
        weight = message.get(_WEIGHT, 1)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise DataError(
                f"{source}, message {index}: {_WEIGHT} must be 0 or 1, got {_short(weight)}"
            )
        if message["role"] == "assistant":
            found.append(bool(weight))
        elif _WEIGHT in message:
            raise DataError(
                f"{source}, message {index}: only an assistant's message has a {_WEIGHT}, this "
                f"one's role is {message['role']}"
            )
    return tuple(found)


def _tools(value: Any, source: str) -> list[ToolSchema]:
    if isinstance(value, str):  # tables of strict types hold schemas as text
        try:
            value = json.loads(value or "[]")
        except ValueError as error:
            raise DataError(f"{source}: tools are text that is no JSON: {error}") from error
    tools = value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{source}: tools must be a list of schemas, got {_short(tools)}")
    return cast("list[ToolSchema]", tools)


def _short(value: Any) -> str:
    return f"{type(value).__name__} {show(value)}"
