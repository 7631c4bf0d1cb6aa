from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentrl.agent.renderer import Renderer
from agentrl.errors import DataError
from agentrl.testing import make_tokenizer
from agentrl.train.sft_config import Turns
from agentrl.train.sft_data import (
    ChatExample,
    ConversationColumns,
    EncodedExample,
    EncodedExamples,
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
    first, second = load_conversations(str(path))
    assert list(first.messages) == TALK and list(first.tools) == []
    assert list(second.tools) == [tool]
    assert second.source.endswith("a.jsonl, line 3")


BAD_ROWS = [
    ("{", "broken JSON"),
    ([1], "object"),
    ({"message": TALK}, "no column 'messages'.*messages_column=message"),
    ({"messages": TALK, "tool": []}, "tools_column=tool"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": ["hello"]}, "message 0: must be a mapping"),
    ({"messages": [{"role": "robot", "content": ""}]}, "role must be one of .*robot"),
    ({"messages": [*TALK, {"role": "user", "content": None}]}, "message 5: content must be text"),
    ({"messages": TALK[:1]}, "no assistant message"),
    ({"messages": [*TALK, {"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    ({"messages": [*TALK, {"role": "user", "content": "x", "weight": 0}]}, "only an assistant"),
    ({"messages": [{**TALK[0]}, {**TALK[1], "weight": 0.5}]}, "weight must be 0 or 1"),
    ({"messages": [{**TALK[0]}, {**TALK[1], "tool_calls": "x"}]}, "tool_calls must be a list"),
    ({"messages": TALK, "tools": "[{"}, "no JSON"),
    ({"messages": TALK, "tools": '"add"'}, "tools must be a list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, row: Any, message: str) -> None:
    path = _write(tmp_path / "a.jsonl", [{"messages": TALK}, row])
    with pytest.raises(DataError, match=f"(?s)line 2.*{message}"):
        load_conversations(str(path))


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe"])
def test_a_missing_empty_or_binary_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl"):
        load_conversations(str(path))


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


def _said(example: EncodedExample, renderer: Renderer) -> str:
    kept = [i for i, learned in zip(example.ids, example.loss_mask, strict=True) if learned]
    return renderer.decode(kept)


def test_the_mask_is_exact_by_token() -> None:
    renderer = Renderer(make_tokenizer())
    (example,) = encode_examples(renderer, [ChatExample(messages=TALK)], max_tokens=200).examples
    text = ""
    spans = []
    for index, learned in zip(example.ids, example.loss_mask, strict=True):
        piece = renderer.decode([index])
        spans.append((text, learned))
        text += piece
    for said in ("let me see<|im_end|>", "4<|im_end|>"):
        start = text.index(said)
        inside = [learned for before, learned in spans if start <= len(before) < start + len(said)]
        assert inside and all(inside)
        header = [before for before, learned in spans if len(before) < start][-1]
        assert not dict(spans)[header]  # the header before an answer is context
    assert sum(example.loss_mask) == len(renderer.encode_answer(TALK[1])[0]) + len(
        renderer.encode_answer(TALK[3])[0]
    )


@pytest.mark.parametrize(
    ("turns", "weights", "said"),
    [
        (Turns.all, None, "let me see<|im_end|>4<|im_end|>"),
        (Turns.last, None, "4<|im_end|>"),
        (Turns.all, (False, True), "4<|im_end|>"),
        (Turns.all, (True, False), "let me see<|im_end|>"),
    ],
)
def test_turns_that_are_not_to_be_learned_are_context(
    turns: Turns, weights: tuple[bool, ...] | None, said: str
) -> None:
    renderer = Renderer(make_tokenizer())
    talk = ChatExample(messages=TALK, weights=weights)
    found = encode_examples(renderer, [talk], max_tokens=200, turns=turns).examples[0]
    assert _said(found, renderer) == said
    everything = encode_examples(renderer, [ChatExample(messages=TALK)], max_tokens=200)
    assert found.ids == everything.examples[0].ids  # context stays where it was


def test_a_conversation_of_which_nothing_is_learned_is_refused() -> None:
    talk = ChatExample(messages=TALK, weights=(False, False), source="a.jsonl, line 9")
    with pytest.raises(DataError, match="line 9.*no turn of it is learned"):
        encode_examples(Renderer(make_tokenizer()), [talk], max_tokens=200)
    last = ChatExample(messages=TALK, weights=(True, False))
    with pytest.raises(DataError, match="turns=last"):
        encode_examples(Renderer(make_tokenizer()), [last], max_tokens=200, turns=Turns.last)


def test_weights_of_a_file_and_other_columns(tmp_path: Path) -> None:
    weighed = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    row = {"chat": weighed, "quality": 3, "source": "web"}
    path = _write(tmp_path / "a.jsonl", [row])
    columns = ConversationColumns(messages="chat")
    (talk,) = load_conversations(str(path), columns=columns)
    assert talk.weights == (False, True)
    assert all("weight" not in message for message in talk.messages)


def test_parquet_with_schemas_as_text_and_empty_fields(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    messages = [{"role": m["role"], "content": m["content"], "name": None} for m in TALK]
    rows = {"messages": [messages], "tools": [json.dumps([tool])]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    (talk,) = load_conversations(str(tmp_path / "a.parquet"))
    assert list(talk.messages) == TALK and list(talk.tools) == [tool]


def test_an_answer_with_a_call_needs_no_text(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    (read,) = load_conversations(str(_write(tmp_path / "a.jsonl", [{"messages": talk}])))
    assert read.messages[1]["content"] == ""


def test_drawing_goes_on_where_it_stopped() -> None:
    examples = [EncodedExample(ids=[i], loss_mask=[False]) for i in range(7)]
    whole = [item.ids[0] for item in islice(endless(examples, seed=1), 30)]
    rest = [item.ids[0] for item in islice(endless(examples, seed=1, start=11), 19)]
    assert rest == whole[11:]


def test_a_digest_tells_other_tokens_masks_and_cuts_apart() -> None:
    def digest(*rows: tuple[list[int], list[bool]]) -> str:
        examples = [EncodedExample(ids=ids, loss_mask=mask) for ids, mask in rows]
        return EncodedExamples(examples=examples).digest()

    base = digest(([1, 2], [False, True]))
    assert base == digest(([1, 2], [False, True]))
    others = [
        digest(([1, 3], [False, True])),
        digest(([1, 2], [True, True])),
        digest(([1], [False]), ([2], [True])),
    ]
    assert len({base, *others}) == 4
