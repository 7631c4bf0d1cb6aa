"""One step's optimizer updates: mini-batches of whole sessions, denominators over each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.loss import Clip, PolicyLoss
from agentrl.batch import Batch
from agentrl.dist.config import ActorConfig
from agentrl.dist.engine import TrainEngine
from agentrl.seeding import derive_seed
from agentrl.train.assemble import TrainBatch, split_sessions
from agentrl.train.config import AlgoConfig, OldLogprobs


def update_policy(
    train_batch: TrainBatch,
    engine: TrainEngine,
    step: int,
    *,
    algo: AlgoConfig,
    actor: ActorConfig,
    seed: int,
) -> dict[str, Any]:
    """Update the policy ``actor.epochs * actor.updates_per_step`` times.

    The first mini-batch is computed with the weights that sampled it (where staleness is 0), so
    the mismatch between the engine's and the trainer's probabilities is measured there, at no
    extra cost.

    Returns:
        Means over the updates under ``actor/``, and ``mismatch/`` of the first.
    """
    batch = train_batch.batch
    assert batch is not None, "an empty batch is not trained on"
    batch.tokens["old_logprobs"] = (
        batch.tokens["logprobs"]
        if algo.old_logprobs is OldLogprobs.rollout
        else engine.infer_batch(batch, tokens_per_micro_batch=actor.tokens_per_micro_batch)
    )
    updates = []
    for epoch in range(actor.epochs):
        order = derive_seed(seed, "mini-batches", step, epoch)
        for mini_batch in split_sessions(batch, actor.updates_per_step, seed=order):
            loss = _prepare(mini_batch, algo, measure_mismatch=not updates)
            updates.append(
                engine.train_mini_batch(
                    mini_batch,
                    loss,
                    tokens_per_micro_batch=actor.tokens_per_micro_batch,
                    with_entropy=True,
                )
            )
    return _combine(updates)


def _prepare(batch: Batch, algo: AlgoConfig, *, measure_mismatch: bool) -> PolicyLoss:
    """Put each token's weight into the batch, by the final mask, and close over the totals."""
    mask, sessions = batch.tokens["loss_mask"], batch.rows["session"][batch.row_of_token]
    totals = denominators(mask, sessions)
    batch.tokens["loss_weights"] = token_weights(mask, sessions, algo.loss_agg, totals)
    return PolicyLoss(
        num_tokens=totals.num_tokens,
        loss=algo.loss,
        clip=Clip(low=algo.clip_low, high=algo.clip_high, dual=algo.dual_clip),
        measure_mismatch=measure_mismatch,
    )


def _combine(updates: list[Mapping[str, float]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "actor/updates": len(updates),
        "actor/skipped_updates": int(sum(update.get("skipped", 0) for update in updates)),
    }
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name.startswith("mismatch/"):
            metrics[name] = values[0]
        elif name.endswith("_max"):
            metrics[f"actor/{name}"] = max(values)
        elif name != "skipped":
            metrics[f"actor/{name}"] = sum(values) / len(values)
    return metrics
