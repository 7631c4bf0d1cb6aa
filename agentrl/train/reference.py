"""The policy that a run started from, kept to measure the distance from it."""

from __future__ import annotations

import copy
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
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_own_tensors(reference), path)
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


@torch.no_grad()
def _load(model: Any, path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(
            f"{str(path)!r} is missing: it holds the reference policy of the KL (algo.kl.coef), "
            "which a resumed run cannot do without; restore it, or start a new run"
        )
    saved, own = load_file(path), _own_tensors(model)
    if saved.keys() != own.keys() or any(saved[n].shape != own[n].shape for n in own):
        raise CheckpointError(f"{str(path)!r} belongs to another model; start a new run")
    for name, value in own.items():
        value.copy_(saved[name])
