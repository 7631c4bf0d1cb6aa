"""What two ranks do in the tests of the sharded engine, and one process beside them.

A program: ``rank_program.py DIRECTORY RANK`` runs every scenario on one of two ranks and leaves
what rank 0 (or, where named so, each rank) found in ``DIRECTORY``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig, Offload, Precision
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks, join_ranks, leave_ranks
from agentrl.dist.sharding import full_tensor
from agentrl.testing.random_models import VOCAB, build

WORLD_SIZE = 2
DEADLINE_S = 120.0
BUDGET = 24
LENGTHS = [9, 14, 6, 3, 17, 11]
SPLITS: dict[str, tuple[list[int], list[int]]] = {
    "half each": ([0, 2, 4], [1, 3, 5]),
    "uneven": ([4], [0, 1, 2, 3, 5]),
    "an empty rank": ([], [0, 1, 2, 3, 4, 5]),
}
LAYOUTS: dict[str, dict[str, int]] = {
    "sharded": {},
    "replicated": {"shard_size": 1},
    "one replica of two shards": {"shard_size": 2},
}
MODELS = ("qwen3", "llama", "gpt2")


def rows(seed: int = 0) -> Batch:
    """Six rows with all that a policy loss reads."""
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    batch = Batch.from_rows(
        {
            "ids": [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS],
            "loss_mask": [(noise(n) < 0.7) & (torch.arange(n) > 0) for n in LENGTHS],
            "advantages": [2 * noise(n) for n in LENGTHS],
            "old_logprobs": [-4.5 + 0.3 * noise(n) for n in LENGTHS],
        }
    )
    mask, session = batch.tokens["loss_mask"], batch.row_of_token
    totals = denominators(mask, session)
    batch.tokens["loss_weights"] = token_weights(mask, session, None, "token-mean", totals)
    return batch


def loss_of(batch: Batch) -> PolicyLoss:
    """The loss of a whole mini-batch."""
    num_tokens = int(batch.tokens["loss_mask"].sum())
    return PolicyLoss(token_loss=Vanilla(), num_tokens=num_tokens, entropy_coef=0.01)


def engine_of(ranks: Ranks, *, model: str = "qwen3", **settings: Any) -> FSDPEngine:
    """An engine over a small model; other ranks than the first begin with other weights."""
    given: dict[str, Any] = {"lr": 1e-2, "grad_clip": 0.0} | settings
    return FSDPEngine(build(model, seed=ranks.rank), None, EngineConfig(**given), ranks=ranks)


@dataclass(slots=True)
class Found:
    """What a training run gave."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    engine: FSDPEngine, mine: Callable[[Batch], Batch], *, num_steps: int = 1, between: Any = None
) -> Found:
    """Take steps on this rank's rows; keep gradients as the optimizer sees them."""
    kept: dict[str, Tensor] = {}
    # The sharded parameters' hooks run after gradients have been summed over ranks.
    hooks = [
        value.register_post_accumulate_grad_hook(lambda p, name=name: kept.update({name: p.grad}))
        for name, value in engine.model.named_parameters()
    ]
    found = Found()
    for step in range(num_steps):
        batch = rows(step)
        found.metrics.append(
            engine.train_mini_batch(mine(batch), loss_of(batch), tokens_per_micro_batch=BUDGET)
        )
        found.gradients.append({n: full_tensor(value).clone() for n, value in kept.items()})
        if between is not None:
            between()
    for hook in hooks:
        hook.remove()
    found.weights = {name: value.clone() for name, value in engine.export_params()}
    return found


def main(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(
        (directory / "rendezvous").as_uri(),
        rank=rank,
        world_size=WORLD_SIZE,
        device="cpu",
        timeout_s=DEADLINE_S / 2,
    )
    found: dict[str, Any] = {}
    for layout, settings in LAYOUTS.items():
        for split, parts in SPLITS.items():
            engine = engine_of(ranks, **settings)
            found[f"{layout}, {split}"] = train(engine, lambda b, p=parts: b.select(p[rank]))
    torch.save(found, directory / f"found_{rank}.pt")
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
