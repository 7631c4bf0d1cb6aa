"""The policy that a run started from, kept to measure the distance from it."""

from __future__ import annotations

import copy
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agentrl.dist.config import Precision
from agentrl.dist.inference import FrozenPolicy
from agentrl.errors import CheckpointError


def open_reference(
    model: Any, path: Path, *, temperature: float, precision: Precision, resumed: bool
) -> FrozenPolicy:
    """Freeze a copy of ``model``; a resumed run takes the weights that it once started from.

    Args:
        model: the policy as the run opens it.
        path: file in the run directory; written by a new run, read by a resumed one.

    Raises:
        CheckpointError: the file is missing from a resumed run, or belongs to another model.
    """
    reference = copy.deepcopy(model)
    if resumed:
        _load(reference, path)
    else:
        _save(reference, path)
    return FrozenPolicy(reference, temperature=temperature, precision=precision)


def _own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the model, tied ones once."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach().contiguous()
    return tensors


def _save(model: Any, path: Path) -> None:
    """Write the weights and their digest, each whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(f".writing-{path.name}")
    save_file(_own_tensors(model), writing)
    digest = _digest(writing)
    os.replace(writing, path)
    digest_path = _digest_path(path)
    writing.write_text(digest)
    os.replace(writing, digest_path)


@torch.no_grad()
def _load(model: Any, path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(
            f"{str(path)!r} is missing: it holds the reference policy of the KL (algo.kl.coef), "
            "which a resumed run cannot do without; restore it, or start a new run"
        )
    digest_path = _digest_path(path)
    if not digest_path.is_file() or digest_path.read_text() != _digest(path):
        raise CheckpointError(
            f"{str(path)!r} is damaged: it differs from its digest in {digest_path.name}; restore "
            "it, or start a new run"
        )
    saved, own = load_file(path), _own_tensors(model)
    if saved.keys() != own.keys() or any(saved[n].shape != own[n].shape for n in own):
        raise CheckpointError(f"{str(path)!r} belongs to another model; start a new run")
    for name, value in own.items():
        value.copy_(saved[name])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".blake2")
