from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl_envs.code_sandbox.demos import demonstrations
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agentrl.errors import ModelError
from agentrl.model.tiny import (
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL_TOKENS,
    START,
    build_tiny,
    tiny_config,
    train_tokenizer,
)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string"}, "retries": {"type": "integer"}},
            },
        },
    }
]


def _render(tokenizer: PreTrainedTokenizerFast, messages: list, **options) -> str:
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore


def _demonstrations(count: int) -> list[list]:
    episodes = itertools.islice(demonstrations("train", 0), count)
    return [list(episode.messages or []) for episode in episodes]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bare = train_tokenizer([""], len(SPECIAL_TOKENS) + 256)
    return train_tokenizer([_render(bare, messages) for messages in _demonstrations(600)])


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_comes_back_as_it_was(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(_ids(tokenizer, text)) == text


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(
        st.sampled_from([START, END, "assistant\n", "user\n", "{", '"', "\\n", "\n", "7", "check("])
    )
)
def test_pieces_of_the_template_come_back_too(
    tokenizer: PreTrainedTokenizerFast, parts: list[str]
) -> None:
    text = "".join(parts)
    assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_special_tokens_are_distinct_and_single(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [_ids(tokenizer, token) for token in (PAD, START, END)]
    assert ids == [[0], [1], [2]]
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 2


def test_a_conversation_has_the_tokens_of_its_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    """What the model produces never merges with the context around it."""
    for messages in _demonstrations(40):
        whole = _ids(tokenizer, _render(tokenizer, messages))
        parts: list[int] = []
        done = ""
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = _render(tokenizer, messages[:position], add_generation_prompt=True)
            after = _render(tokenizer, messages[: position + 1]).removesuffix("\n")
            parts += _ids(tokenizer, before[len(done) :]) + _ids(tokenizer, after[len(before) :])
            done = after
        assert whole == parts + _ids(tokenizer, "\n")


def test_an_episode_is_short(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [
        len(_ids(tokenizer, _render(tokenizer, messages))) for messages in _demonstrations(200)
    ]
    assert sum(lengths) / len(lengths) < 95


def test_no_token_spans_two_lines_of_code_or_a_digit(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    assert not [t for t in tokens if r"\n" in t[1:]]
    assert not [t for t in tokens if len(t) > 1 and any(c.isdigit() and c.isascii() for c in t)]


def test_template_writes_hermes_calls_that_parse(tokenizer: PreTrainedTokenizerFast) -> None:
    arguments = {"code": 'print("a\\n<b>é")\nx = 1', "retries": 2}
    calls = [{"type": "function", "function": {"name": "python", "arguments": arguments}}] * 2
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Trying.", "tool_calls": calls},
        {"role": "tool", "name": "python", "content": "ok"},
        {"role": "tool", "name": "python", "content": "ok too"},
        {"role": "assistant", "content": "done"},
    ]
    text = _render(tokenizer, messages)
    assert text.startswith(
        "<|im_start|>system\nTools: python(code: string, retries: integer)<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\nTrying.\n<tool_call>\n"
    )
    bodies = [piece.split("\n</tool_call>")[0] for piece in text.split("<tool_call>\n")[1:]]
    assert [json.loads(body) for body in bodies] == [{"name": "python", "arguments": arguments}] * 2
    assert text.endswith(
        "<|im_start|>tool\n<tool_response>\nok\n</tool_response><|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\nok too\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>\n"
    )


def test_template_without_tools_or_system_message(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_template_lists_a_tool_without_parameters(tokenizer: PreTrainedTokenizerFast) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "look"}}]
    messages = [{"role": "system", "content": "S."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert isinstance(text, str)
    assert text.startswith("<|im_start|>system\nS.\nTools: look()<|im_end|>\n")


@pytest.mark.timeout(60)
def test_a_very_long_line_is_learned_from_in_time() -> None:
    """In one piece its merges would take many minutes."""
    tokenizer = train_tokenizer(["hi " * 150_000, "hello"], 300)
    assert len(tokenizer("hi " * 8)["input_ids"]) < 8


def test_training_is_deterministic() -> None:
    texts = ["<|im_start|>user\nhello hello world 12<|im_end|>\n"] * 5
    first, second = (train_tokenizer(texts, 280) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()


@pytest.mark.parametrize(("texts", "vocab_size"), [(["a"], 100), ("a string", 300)])
def test_bad_arguments_are_refused(texts, vocab_size: int) -> None:
    with pytest.raises(ModelError, match="got"):
        train_tokenizer(texts, vocab_size)


def test_model_is_a_function_of_the_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (build_tiny(tokenizer, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected), "the global generator was moved"
    weights = [model.model.embed_tokens.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert 200_000 < sum(p.numel() for p in one.parameters()) < 1_000_000


def test_saved_model_and_tokenizer_load_by_auto_classes(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = build_tiny(tokenizer, 0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    text = _render(tokenizer, _demonstrations(1)[0])
    ids = _ids(tokenizer, text)
    assert _ids(loaded_tokenizer, text) == ids
    assert loaded_tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded_tokenizer.pad_token_id == 0 and loaded_tokenizer.eos_token_id == 2
    with torch.no_grad():
        expected, got = (m(input_ids=torch.tensor([ids])).logits for m in (model, loaded))
    assert torch.equal(expected, got)
    assert loaded.generation_config.eos_token_id == 2
    assert loaded.generation_config.pad_token_id == 0


def test_too_few_embeddings_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ModelError, match="tokens"):
        build_tiny(tokenizer, 0, tiny_config(300))
