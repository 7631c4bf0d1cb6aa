"""Tiny random models of several architectures, for tests of engines: no download, no training.

:data:`BUILDERS` names them; all but ``gpt2`` are Llamas and Qwens, tied and untied, with and
without biases, grouped and plain attention, and several rotary embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 101
_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def _qwen3(**how: Any) -> Qwen3Config:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    return Qwen3Config(**_SIZES, **{**heads, **how})


def _llama(**how: Any) -> LlamaConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaConfig(**_SIZES, **{**heads, **how})


def _qwen2(**how: Any) -> Qwen2Config:
    return Qwen2Config(**_SIZES, num_attention_heads=6, num_key_value_heads=2, **how)


BUILDERS: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(_qwen3(tie_word_embeddings=True)),
    "qwen3-untied": lambda: Qwen3ForCausalLM(
        _qwen3(tie_word_embeddings=False, num_attention_heads=8, num_key_value_heads=2)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(_qwen2()),
    "llama": lambda: LlamaForCausalLM(_llama(attention_bias=True, mlp_bias=True)),
    "llama-rope3": lambda: LlamaForCausalLM(
        _llama(rope_parameters=_LLAMA3_ROPE, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "llama-yarn": lambda: LlamaForCausalLM(_llama(rope_parameters=_YARN)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB, n_positions=256,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
}  # fmt: skip

STATIC = [name for name in BUILDERS if name != "gpt2"]


_WIDE_HEADS: dict[str, Any] = {
    **_SIZES,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SERVED: dict[str, Any] = {
    "tiny-qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_WIDE_HEADS, head_dim=32, tie_word_embeddings=True)
    ),
    "tiny-llama": lambda: LlamaForCausalLM(
        LlamaConfig(**_WIDE_HEADS, head_dim=32, attention_bias=True, tie_word_embeddings=False)
    ),
    "tiny-qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{**_WIDE_HEADS, "num_attention_heads": 2}, tie_word_embeddings=False)
    ),
    "qwen2.5-0.5b": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32_768,
            tie_word_embeddings=True,
        )
    ),
    "qwen3-1.7b": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128,
            max_position_embeddings=32_768, tie_word_embeddings=True,
        )
    ),
}  # fmt: skip
"""Models whose heads are wide enough for vLLM's kernels (32 and more), two of real shapes."""


def build(name: str = "qwen3", seed: int = 0) -> Any:
    """Build the model ``name`` of :data:`BUILDERS` or :data:`SERVED` in float32, to evaluate.

    Its weights are large enough for a distribution that varies from token to token.
    """
    torch.manual_seed(seed)
    model = (BUILDERS | SERVED)[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.uniform_(0.5, 1.5)
    return model
