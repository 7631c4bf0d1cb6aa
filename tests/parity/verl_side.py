"""The only door to verl: loaded by name, since type checking runs where it is not installed."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("VERL_FORCE_DEVICE", "cpu")

core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
correction: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
_actor: Any = importlib.import_module("verl.workers.config.actor")
_algorithm: Any = importlib.import_module("verl.trainer.config.algorithm")


def algo_config(**settings: Any) -> Any:
    """verl's settings of an estimator, with the attribute and ``get`` access that it uses."""
    return _algorithm.AlgoConfig(**settings)


def actor_config(policy_loss: dict[str, Any] | None = None, **settings: Any) -> Any:
    """verl's settings of a loss."""
    if policy_loss and "rollout_correction" in policy_loss:
        rules = _algorithm.RolloutCorrectionConfig(**policy_loss["rollout_correction"])
        policy_loss = policy_loss | {"rollout_correction": rules}
    defaults = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    return _actor.FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=_actor.PolicyLossConfig(**(policy_loss or {})),
        **(defaults | settings),
    )


def policy_loss(
    name: str,
    old: Tensor,
    new: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mode: str,
    config: Any,
    weights: Tensor | None = None,
) -> tuple[float, Tensor]:
    """Loss and its gradient by ``new``, [B, T]."""
    leaf = new.clone().requires_grad_()
    loss, _ = core.POLICY_LOSS_REGISTRY[name](
        old_log_prob=old,
        log_prob=leaf,
        advantages=advantages,
        response_mask=mask.float(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient
