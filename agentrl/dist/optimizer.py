"""AdamW over a module's parameters."""

from __future__ import annotations

import torch
from torch import nn

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
