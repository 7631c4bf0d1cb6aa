"""AdamW over a module's parameters, and the norm of their gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
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
    trained = [value for value in parameters if value.grad is not None]
    norm = torch.nn.utils.get_total_norm(
        [value.grad for value in trained if value.grad is not None]
    )
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if limit:
        torch.nn.utils.clip_grads_with_norm_(trained, limit, norm)
    return float(norm)
