"""Settings of training engines. Imports no torch, so that a command line can compose it fast."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """What the learning rate does after its warm-up. Members are named as they are written."""

    constant = "constant"
    """Stays at ``lr``."""
    linear = "linear"
    """Falls on a straight line to ``min_lr_fraction`` at the last optimizer step."""
    cosine = "cosine"
    """Falls on half a cosine to ``min_lr_fraction`` at the last optimizer step."""


class Precision(StrEnum):
    """Number format of forward and backward; weights and optimizer are always float32."""

    fp32 = "fp32"
    """float32 throughout."""
    bf16 = "bf16"
    """bfloat16 autocast. On a GPU; CPU cores without matrix instructions gain nothing from it."""


@dataclass(slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its schedule, and gradient clipping."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Applied to matrices only: never to norms and biases."""
    schedule: Schedule = Schedule.constant
    """What the learning rate does after its warm-up."""
    warmup_steps: int = 0
    """Optimizer steps (not trainer steps) over which the rate rises from 0 on a straight line."""
    min_lr_fraction: float = 0.0
    """Floor of a falling schedule, as a fraction of ``lr``."""
    grad_clip: float = 1.0
    """Largest L2 norm of the gradient over all parameters; 0 does not clip."""


@dataclass(slots=True, kw_only=True)
class ActorConfig(OptimizerConfig):
    """How the policy is trained."""

    precision: Precision = Precision.fp32
    """Number format of forward and backward; weights and optimizer are always float32."""
    updates_per_step: int = 1
    """Mini-batches (optimizer steps) per epoch over one step's batch, cut at sessions by tokens."""
    epochs: int = 1
    """Passes over one step's batch."""
    tokens_per_micro_batch: int = 8192
    """Tokens of one forward and backward. Changes memory and speed, never the gradient."""
