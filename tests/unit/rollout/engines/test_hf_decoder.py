"""The static decoder computes what transformers computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.rollout.engines.hf_decoder import StaticDecoder
from agentrl.rollout.engines.hf_weights import refusal
from agentrl.testing.random_models import STATIC, VOCAB, build

NUM_ROWS, CONTEXT = 6, 256


def decoder(model: object) -> StaticDecoder:
    return StaticDecoder(
        model,
        num_rows=NUM_ROWS,
        max_context=CONTEXT,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.mark.parametrize("name", STATIC)
def test_logits_equal_transformers_in_rows_at_positions_of_their_own(name: str) -> None:
    model = build(name)
    subject = decoder(model)
    ids = torch.randint(0, VOCAB, (2, 230), generator=torch.Generator().manual_seed(1))
    tokens = ids.numpy()
    # Row 4 holds 200 tokens of the first sequence, row 1 only 7 of the second.
    rows, counts = np.array([4, 1]), np.array([200, 7])
    active = np.zeros(NUM_ROWS, bool)
    active[rows] = True
    positions = np.zeros(NUM_ROWS, np.int64)
    positions[rows] = counts
    with torch.inference_mode():
        expected = model(ids).logits
        subject.prefill(tokens[:, :200], rows, np.zeros(2, np.int64), counts, CONTEXT, 224)
        for _ in range(20):
            fed = np.zeros(NUM_ROWS, np.int64)
            fed[rows] = tokens[[0, 1], positions[rows]]
            logits = subject.decode(fed, positions, active, 224)
            for sequence, row in enumerate(rows):
                truth = expected[sequence, positions[row]]
                assert (logits[row] - truth).abs().max() < 1e-5
            positions[rows] += 1


def test_idle_rows_and_padding_leave_no_trace() -> None:
    subject = decoder(build())
    ids = np.arange(10).reshape(1, 10)
    with torch.inference_mode():
        subject.prefill(ids, np.array([2]), np.array([0]), np.array([10]), 32, 10)
        before = subject.save_row(2, 10)
        padded, counts = np.zeros((3, 8), np.int64), np.array([8, 0, 0])
        subject.prefill(padded, np.array([0, 2, 2]), np.array([0, 0, 0]), counts, 32, 16)
        idle = np.array([True, False, False, True, False, False])
        subject.decode(np.ones(6, np.int64), np.full(6, 3), idle, 32)
        assert torch.equal(subject.save_row(2, 10), before)


def test_saved_rows_come_back_bit_for_bit_in_any_row() -> None:
    subject = decoder(build())
    ids = np.arange(20).reshape(1, 20)
    with torch.inference_mode():
        subject.prefill(ids, np.array([2]), np.array([0]), np.array([20]), 32, 20)
        saved = subject.save_row(2, 20)
        subject.load_row(5, saved, 20)
        subject.copy_prefix(5, 0, 12)
        assert torch.equal(subject.save_row(5, 20), saved)
        assert torch.equal(subject.save_row(0, 12), saved[:, :, :, :12])
    assert subject.num_bytes(saved) == 3 * 2 * 20 * 16 * 4


def test_named_weights_are_the_modules_own() -> None:
    for name in STATIC:
        model = build(name)
        served = dict(decoder(model).named_weights())
        own = dict(model.named_parameters())
        assert served.keys() == own.keys()
        assert all(torch.equal(served[key], own[key]) for key in own)


def test_architectures_it_cannot_follow_are_named() -> None:
    assert refusal(build("qwen3"), 256) is None
    assert "gpt2" in str(refusal(build("gpt2"), 256))
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    mistral = MistralForCausalLM(MistralConfig(**sizes, **heads))
    assert "mistral" in str(refusal(mistral, 256))
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    }
    qwen = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **window))
    assert "sliding window of 64" in str(refusal(qwen, 256))
    assert refusal(qwen, 64) is None
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    dynamic: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 128}
    qwen = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **dynamic))
    assert "dynamic" in str(refusal(qwen, 256))
    assert refusal(qwen, 128) is None
