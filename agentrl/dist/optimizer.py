"""AdamW over a module's parameters, with a state that names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.dist.config import OptimizerConfig
from agentrl.errors import CheckpointError

_STATES = ("step", "exp_avg", "exp_avg_sq")


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


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, dict[str, Tensor]]:
    """Copy the optimizer's tensors to the CPU: ``{"exp_avg": {parameter name: tensor}, ...}``."""
    return {
        kind: {
            name: optimizer.state[value][kind].detach().to("cpu", copy=True)
            for name, value in model.named_parameters()
            if kind in optimizer.state.get(value, {})
        }
        for kind in _STATES
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Undo :func:`optimizer_state`.

    Raises:
        CheckpointError: the state names a parameter that the model lacks, or of another shape.
    """
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for kind in _STATES:
        for name, saved in state.get(kind, {}).items():
            parameter = parameters.get(name)
            if parameter is None or (kind != "step" and saved.shape != parameter.shape):
                here = "absent" if parameter is None else str(tuple(parameter.shape))
                raise CheckpointError(
                    f"optimizer state {kind!r} of {name!r} has shape {tuple(saved.shape)}, the "
                    f"model's is {here}: the checkpoint belongs to another model"
                )
            optimizer.state[parameter][kind] = saved.to(parameter.device, copy=True)
