"""Learning-rate schedules."""

from __future__ import annotations

import math

from agentrl.dist.config import OptimizerConfig, Schedule
from agentrl.errors import ConfigError


def learning_rate(config: OptimizerConfig, *, num_updates: int, total_updates: int | None) -> float:
    """Return the rate of the next optimizer step.

    Args:
        config: peak rate, warm-up, kind of schedule, floor.
        num_updates: optimizer steps taken so far. The only state there is: a resumed run that
            restores it goes on exactly where it was.
        total_updates: optimizer steps of the whole run; a falling schedule ends there.

    Raises:
        ConfigError: a falling schedule without ``total_updates``.
    """
    if num_updates < config.warmup_steps:
        return config.lr * (num_updates + 1) / config.warmup_steps
    if config.schedule is Schedule.constant:
        return config.lr
    if total_updates is None:
        raise ConfigError(
            f"schedule={config.schedule} falls towards the last optimizer step, but the number of "
            "steps is not known; give total_updates, or use schedule=constant"
        )
    span = max(total_updates - config.warmup_steps, 1)
    progress = min((num_updates - config.warmup_steps) / span, 1.0)
    if config.schedule is Schedule.linear:
        shape = 1.0 - progress
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * shape)
