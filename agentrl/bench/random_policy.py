"""A policy with random weights in a real shape, that never ends a turn by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from agentrl.agent.renderer import Renderer
from agentrl.model.load import quiet_transformers
from agentrl.testing import make_tokenizer
from agentrl.testing.decode_time import ModelShape

BYTES_ONLY = 260
"""Vocabulary of a tokenizer in which every letter is a token, and no random turn a tool call."""
_CONSTANT, _REFUSAL = 1.0, -64.0

SHAPES: dict[str, Any] = {
    "tiny": lambda: Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "small": lambda: Qwen2Config(
        vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": lambda: Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": lambda: Qwen3Config(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
}  # fmt: skip


def write_policy(name: str, directory: Path, *, seed: int = 0) -> ModelShape:
    """Write a model of :data:`SHAPES` with a tokenizer of bytes; returns what its cost depends on.

    Weights are drawn with ``seed`` and written in bfloat16.
    """
    config = SHAPES[name]()
    tokenizer = make_tokenizer(vocab_size=BYTES_ONLY)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with quiet_transformers():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        never_say(model, list(Renderer(tokenizer).stop_token_ids))
        model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return shape_of(config, num_params=sum(p.numel() for p in model.parameters()))


@torch.no_grad()
def never_say(model: Any, token_ids: list[int]) -> None:
    """Make tokens so unlikely that they are not sampled, whatever stands before them.

    One coordinate of the residual stream is the same positive constant at every position: all
    tokens bring it and no layer writes to it. Only the embeddings of ``token_ids``, which are their
    rows in the tied head too, have a large negative number there, and with it a low logit.
    """
    embeddings = model.get_input_embeddings().weight
    embeddings[:, 0] = _CONSTANT
    embeddings[token_ids, 0] = _REFUSAL
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0


def shape_of(config: Any, *, num_params: int) -> ModelShape:
    """Return the cost's shape of a decoder whose head is tied to its embeddings."""
    heads = config.num_attention_heads
    return ModelShape(
        matmul_params=float(num_params),
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def prompt_chars(num_tokens: int) -> int:
    """Return the letters of a user message whose rendered prompt has ``num_tokens`` tokens."""
    renderer = Renderer(make_tokenizer(vocab_size=BYTES_ONLY))
    probe = renderer.begin([{"role": "user", "content": "A"}])
    return num_tokens - len(probe.prompt_ids()) + 1
