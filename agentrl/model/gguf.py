"""Plain checkpoints out of ``.gguf`` files, converted once and cached by content."""

from __future__ import annotations

import importlib.util
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import ModelError
from agentrl.extras import missing_extra
from agentrl.model.cache import cache_root, file_sha256, make_once

_NEEDED = ("gguf", "accelerate")


def converted(path: Path) -> Path:
    """Return a directory with the weights of ``path`` in float32, configuration and tokenizer.

    De-quantised weights are exact in float32, but they are not the weights that were quantised.

    Raises:
        ModelError: the file cannot be read, a package is missing, or the cache cannot be written.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(missing_extra("gguf", f"reading {path.name!r}"))
    target = cache_root() / "gguf" / f"{path.stem}-{file_sha256(path)[:16]}"
    make_once(target, lambda folder: _convert(path, folder))
    return target


def _convert(path: Path, folder: Path) -> None:
    try:
        with redirect_stderr(StringIO()):  # its progress bar cannot be switched off
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
    except Exception as error:  # the readers raise whatever a damaged file leads them to
        raise ModelError(
            f"cannot read {str(path)!r} as a GGUF model ({type(error).__name__}: {error}); is the "
            "file whole, and its architecture one that transformers can convert?"
        ) from error
    # The loaded module still counts as quantised and would refuse to be saved: build a plain one.
    config: Any = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
