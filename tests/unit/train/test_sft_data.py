from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.renderer import Renderer
from agentrl.errors import DataError
from agentrl.testing import make_tokenizer
from agentrl.train.sft_data import (
    ChatExample,
    EncodedExample,
    encode_examples,
    endless,
    load_conversations,
    to_batch,
)
from agentrl.types import Message

TALK: list[Message] = [
    {"role": "user", "content": "two plus two?"},
    {"role": "assistant", "content": "let me see"},
    {"role": "user", "content": "well?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "thanks"},
]


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_loss_falls_on_what_assistants_said_and_nothing_else() -> None:
    renderer = Renderer(make_tokenizer())
    encoded = encode_examples(renderer, [ChatExample(messages=TALK)], max_tokens=200)
    example = encoded.examples[0]
    said = [i for i, trained in zip(example.ids, example.loss_mask, strict=True) if trained]
    assert renderer.decode(said) == "let me see<|im_end|>4<|im_end|>"
    assert "thanks" not in renderer.decode(example.ids)  # context that nothing learns from


def test_a_file_comes_back_with_its_tools(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    path = _write(
        tmp_path / "a.jsonl", [{"messages": TALK}, "", {"messages": TALK, "tools": [tool]}]
    )
    first, second = load_conversations(path)
    assert list(first.messages) == TALK and list(first.tools) == []
    assert list(second.tools) == [tool]
    assert second.source.endswith("a.jsonl, line 3")


BAD_ROWS = [
    ("{", "not JSON"),
    ([1], "object"),
    ({"message": TALK}, "unknown keys .*message"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": ["hello"]}, "message 0: must be a mapping"),
    ({"messages": [{"role": "robot", "content": ""}]}, "role must be one of .*robot"),
    ({"messages": [*TALK, {"role": "user", "content": None}]}, "message 5: content must be text"),
    ({"messages": TALK[:1]}, "no assistant message"),
    ({"messages": TALK, "tools": "add"}, "tools must be a list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, row: Any, message: str) -> None:
    path = _write(tmp_path / "a.jsonl", [{"messages": TALK}, row])
    with pytest.raises(DataError, match=f"(?s)line 2.*{message}"):
        load_conversations(path)


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe"])
def test_a_missing_empty_or_binary_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl"):
        load_conversations(path)


def test_long_conversations_are_counted_and_never_cut() -> None:
    renderer = Renderer(make_tokenizer())
    long: list[Message] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "word " * 500},
    ]
    examples = [ChatExample(messages=TALK), ChatExample(messages=long), ChatExample(messages=TALK)]
    encoded = encode_examples(renderer, examples, max_tokens=100)
    assert (len(encoded.examples), encoded.num_too_long) == (2, 1)
    with pytest.raises(DataError, match="max_tokens"):
        encode_examples(renderer, examples, max_tokens=3)


def test_every_pass_holds_every_example_once_in_an_order_of_the_seed() -> None:
    examples = [EncodedExample(ids=[i], loss_mask=[False]) for i in range(20)]
    drawn = [item.ids[0] for item in islice(endless(examples, seed=1), 40)]
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == list(range(20))
    assert drawn[:20] != drawn[20:]
    assert drawn == [item.ids[0] for item in islice(endless(examples, seed=1), 40)]
    assert drawn != [item.ids[0] for item in islice(endless(examples, seed=2), 40)]


def test_every_assistant_token_of_a_batch_weighs_the_same() -> None:
    batch = to_batch(
        [
            EncodedExample(ids=[1, 2, 3], loss_mask=[False, True, True]),
            EncodedExample(ids=[4, 5], loss_mask=[False, True]),
        ]
    )
    third = pytest.approx(1 / 3)
    assert batch.tokens["loss_weights"].tolist() == [0.0, third, third, 0.0, third]
