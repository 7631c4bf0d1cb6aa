"""A small policy and a ragged batch for the tests of training engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.batch import Batch

VOCABULARY = 97


def _tiny_model(seed: int = 0, *, tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def _ragged_batch(seed: int = 0, lengths: tuple[int, ...] = (12, 5, 30, 1, 17, 8)) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def random(length: int) -> torch.Tensor:
        return torch.rand(length, generator=generator)

    batch = Batch.from_rows(
        {
            "ids": [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths],
            "loss_mask": [(random(n) < 0.5) & (torch.arange(n) > 1) for n in lengths],
            "advantages": [random(n) - 0.5 for n in lengths],
            "old_logprobs": [-4.5 - 0.1 * random(n) for n in lengths],
        },
        {"session": torch.arange(len(lengths))},
    )
    mask, sessions = batch.tokens["loss_mask"], batch.row_of_token
    totals = denominators(mask, sessions)
    batch.tokens["loss_weights"] = token_weights(mask, sessions, None, "token-mean", totals)
    return batch


@pytest.fixture
def tiny_model() -> Callable[..., Qwen3ForCausalLM]:
    """``tiny_model(seed=0, tied=True)``: a Qwen3 of two layers."""
    return _tiny_model


@pytest.fixture
def ragged_batch() -> Callable[..., Batch]:
    """``ragged_batch(seed=0, lengths=...)``; a row of one token has nothing to train."""
    return _ragged_batch
