"""Encoding that cannot produce control tokens, and cutting in tokens."""

from __future__ import annotations

import pytest
from chat_tokenizers import qwen3_like
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent.codec import TokenCodec, clean_text
from agentrl.errors import RenderError
from agentrl.testing import make_tokenizer

CODEC = TokenCodec(qwen3_like())
words = st.one_of(st.text(max_size=6), st.sampled_from([*CODEC.control_tokens, "<|im_", "end|>"]))


@given(st.lists(words, max_size=8).map("".join))
def test_plain_text_never_holds_control_tokens_and_comes_back(text: str):
    ids = CODEC.encode_plain(text)
    assert CODEC.control_ids.isdisjoint(ids)
    assert CODEC.decode(ids) == text


@given(st.lists(words, max_size=8).map("".join))
def test_assistant_text_keeps_added_tokens_but_no_special_ones(text: str):
    ids = CODEC.encode_assistant(text)
    assert CODEC.special_ids.isdisjoint(ids)
    assert CODEC.decode(ids) == text


def test_text_without_control_words_is_encoded_as_the_tokenizer_does():
    tokenizer = make_tokenizer()
    text = "def f(x):\n    return x + 1\n"
    assert TokenCodec(tokenizer).encode_plain(text) == tokenizer.encode(text)


def test_template_text_is_split_at_its_control_tokens():
    im_start, call = CODEC.control_tokens["<|im_start|>"], CODEC.control_tokens["<tool_call>"]
    assert CODEC.split_controls("a<|im_start|>b<tool_call>") == ["a", im_start, "b", call]


@given(st.text(max_size=200), st.integers(1, 30))
def test_a_cut_keeps_a_prefix_of_at_most_that_many_tokens(text: str, limit: int):
    kept, dropped = CODEC.cut(text, limit)
    assert text.startswith(kept)
    assert (dropped > 0) == (kept != text)
    if not CODEC.control_tokens.keys() & {kept}:
        assert len(CODEC.encode_plain(kept)) <= limit + 1  # a cut character has half a token


@pytest.mark.parametrize("spelling", ["<|im_end|>", "<tool_call>", "<|im_end|>ab "])
def test_what_spells_control_tokens_passes_no_limit(spelling: str):
    kept, dropped = CODEC.cut(spelling * 100, 50)
    assert len(CODEC.encode_plain(kept)) == 50
    assert dropped == len(CODEC.encode_plain(spelling * 100)) - 50


def test_the_number_of_tokens_cut_is_exact_for_short_text():
    text = "abcdefgh" * 4
    num_tokens = len(CODEC.encode_plain(text))
    kept, dropped = CODEC.cut(text, 3)
    assert len(CODEC.encode_plain(kept)) == 3 and dropped == num_tokens - 3


def test_a_look_alike_that_a_normaliser_turns_into_a_control_token_stays_text():
    from tokenizers import AddedToken, normalizers

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<x>", special=True, normalized=True)]}
    )
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    codec = TokenCodec(tokenizer)
    ids = codec.encode_plain("a \uff1cx\uff1e b")
    assert codec.control_tokens["<x>"] not in ids
    assert codec.decode(ids) == "a <x> b" == codec.normalize("a \uff1cx\uff1e b")


def test_lone_surrogates_are_replaced_and_everything_else_is_kept():
    assert clean_text("a\ud800b\U0001f600") == "a?b\U0001f600"
    assert clean_text("plain") == "plain"


def test_a_tokenizer_without_a_fast_backend_is_refused():
    with pytest.raises(RenderError, match="use_fast"):
        TokenCodec(object())
