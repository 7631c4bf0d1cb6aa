"""AdamW over a module's parameters, and the norm of their gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from agentrl.dist.config import OptimizerConfig


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over all trainable parameters; only matrices decay, norms and biases do not."""
    trainable = [value for value in model.parameters() if value.requires_grad]
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        [
            {
                "params": [value for value in trainable if value.ndim >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [value for value in trainable if value.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        fused=True,
    )


def clip_gradient(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale gradients down to an L2 norm of ``limit`` over all of them; 0 does not clip.

    Sharded gradients count whole: ranks call it together and get the same norm.

    Returns:
        The norm before; where it is not finite, gradients are not to be used.
    """
    grads = [value.grad for value in parameters if value.grad is not None]
    # On the shards themselves: every operation on hundreds of DTensors costs milliseconds.
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = torch.nn.utils.get_total_norm(shards)
    norm = _over_shards(norm, next((grad for grad in grads if isinstance(grad, DTensor)), None))
    if limit:
        torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
            shards, (limit / (norm + 1e-6)).clamp(max=1.0)
        )
    return float(norm)


def _over_shards(norm: torch.Tensor, like: DTensor | None) -> torch.Tensor:
    """Combine the norms of the shards of ranks; ranks that hold copies of a shard count once."""
    if like is None:
        return norm
    square = norm.square()
    for dimension, placement in enumerate(like.placements):
        if placement.is_shard():
            dist.all_reduce(square, group=like.device_mesh.get_group(dimension))
    return square.sqrt()
