"""Which settings of an optimizer cannot work. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from agentrl.dist.config import OptimizerConfig

_MIN_LR = 1e-9  # AdamW moves a weight by about the rate, and float32 loses 6e-8 of a weight
_MAX_LR = 1.0  # and weights are mostly smaller than this


def optimizer_problems(config: OptimizerConfig, *, prefix: str) -> Iterator[str]:
    """Say what is wrong with the optimizer, its schedule or its clipping, one line each.

    Args:
        config: of a policy, a critic or supervised training.
        prefix: of its settings' names, with the dot, such as ``actor.``.
    """
    for name in ("lr", "weight_decay", "grad_clip", "warmup_steps"):
        value = getattr(config, name)
        if not (value >= 0 and math.isfinite(value)):
            yield f"{prefix}{name}={value}: must be a finite number of at least 0"
    if not 0 <= config.min_lr_fraction <= 1:
        yield f"{prefix}min_lr_fraction={config.min_lr_fraction}: must be between 0 and 1"
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        yield (
            f"{prefix}betas={list(config.betas)}: must be two numbers in [0, 1), "
            f"for example {prefix}betas=[0.9,0.95]"
        )
    if not (config.eps > 0 and math.isfinite(config.eps)):
        yield f"{prefix}eps={config.eps}: must be a finite number above 0 (1e-8 is customary)"
    if 0 < config.lr < _MIN_LR:
        yield (
            f"{prefix}lr={config.lr}: weights are float32 (with {prefix}precision=bf16 too), where "
            "a step below 6e-8 of a weight is lost: most would never move; use at least "
            f"{_MIN_LR:g} (1e-6 is customary), or {prefix}lr=0 to train nothing"
        )
    if _MAX_LR < config.lr < math.inf:
        yield (
            f"{prefix}lr={config.lr}: AdamW moves every weight by about the rate, so the first "
            f"step would overwrite the model; use at most {_MAX_LR:g} (1e-6 is customary)"
        )
