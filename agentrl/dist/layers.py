"""Compiles the decoder layers of a model, and recomputes their activations.

Both replace the ``forward`` of each layer, and nothing else: hooks on a layer (sharding) stay
outside of what is compiled, names of parameters stay, and a copy of the model has layers of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from agentrl.dist.config import Recompute
from agentrl.errors import ModelError

BACKEND = "inductor"
"""Of ``torch.compile``."""
ROUND_TO = 256
"""A compiled model's buffers are as long as a multiple of this."""


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the layers that transformers does not split over devices, first to last.

    Raises:
        ModelError: it names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), so that they "
            "can be neither compiled, recomputed nor sharded; set compile=false, recompute=none"
        )
    return layers


def prepare_layers(model: Any, *, recompute: Recompute, compile: bool) -> None:
    """Recompute and compile every layer as asked. Once per model."""
    if recompute is Recompute.none and not compile:
        return
    ready: dict[Callable[..., Any], Callable[..., Any]] = {}
    for layer in decoder_layers(model):
        forward = type(layer).forward
        if forward not in ready:
            ready[forward] = _prepared(forward, recompute=recompute, compile=compile)
        layer.forward = MethodType(ready[forward], layer)


def _prepared(
    forward: Callable[..., Any], *, recompute: Recompute, compile: bool
) -> Callable[..., Any]:
    if recompute is not Recompute.none:
        forward = _recomputed(forward, recompute)
    if compile:
        # One graph or an error: never an eager run unasked. Layers share the code, so it is
        # compiled once for all of them, for any number of rows and tokens.
        forward = torch.compile(forward, fullgraph=True, dynamic=True, backend=BACKEND)
    return forward


def _recomputed(forward: Callable[..., Any], recompute: Recompute) -> Callable[..., Any]:
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute is Recompute.selective:
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **how, **kwargs)

    return recomputed


def _keep_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to compute: matrix products and attention."""
    name = str(operator)
    kept = any(part in name for part in _KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_KEPT = (
    "aten.mm.",
    "aten.addmm.",
    "aten.bmm.",
    "aten._scaled_dot_product",
    "torch_attn._varlen_attn.",
)
