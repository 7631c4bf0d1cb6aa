"""Models and tokenizers from a hub id, a directory or a ``.gguf`` file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import ModelError


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A policy that can be sampled and trained."""

    model: Any
    """An ``AutoModelForCausalLM`` in float32 and evaluation mode."""
    tokenizer: Any
    source: str


def load_model(path: str, *, device: str = "auto", chat_template: str | None = None) -> LoadedModel:
    """Load a model and its tokenizer.

    Raises:
        ModelError: nothing there that can be loaded.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text()
    return LoadedModel(
        model=model.to(resolve_device(device)).eval(), tokenizer=tokenizer, source=path
    )


def load_with_weights(
    folder: Path, weights: Mapping[str, Tensor], *, device: str = "auto"
) -> LoadedModel:
    """Build a model from configuration and tokenizer in ``folder``, with ``weights``.

    Raises:
        ModelError: the weights are those of another model.
    """
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    model.tie_weights()
    tied = {name for name in missing if name.endswith("lm_head.weight")}
    if unexpected or set(missing) - tied:
        raise ModelError(
            f"the weights do not fit the configuration in {str(folder)!r}: "
            f"missing {sorted(set(missing) - tied)[:3]}, unknown {sorted(unexpected)[:3]}"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return LoadedModel(
        model=model.to(resolve_device(device)).eval(), tokenizer=tokenizer, source=str(folder)
    )


def resolve_device(device: str) -> str:
    """Return ``device``, with ``auto`` as CUDA where there is one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
