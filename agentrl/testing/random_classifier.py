"""A tiny random sequence classifier with a chat template, for tests of reward models."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from agentrl.testing.tokenizer import make_tokenizer


def save_classifier(
    path: Path, *, num_labels: int = 1, with_head: bool = True, seed: int = 0
) -> str:
    """Write model and tokenizer to ``path``, which is returned as text.

    Args:
        num_labels: logits that it has.
        with_head: False leaves out the layer that makes them, as a base model does.
        seed: of the weights.
    """
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config.num_labels = num_labels
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    saved = model if with_head else model.model
    saved.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
