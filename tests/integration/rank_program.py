"""Scenarios of the sharded engine: what two ranks do, and one process does beside them.

A program: ``rank_program.py DIRECTORY RANK`` runs every scenario on one of two ranks, and writes
what it found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.algo.value import ValueLoss
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig, LoraConfig, Offload, Precision
from agentrl.dist.engine import LossFn
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.lora import attach_adapters
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
SHARED = (list(range(6)), list(range(6)))
"""Ranks that share their rows."""
LAYOUTS: dict[str, dict[str, int]] = {
    "sharded": {},
    "replicated": {"shard_size": 1},
    "one replica of two shards": {"shard_size": 2},
}
POISONED_ROW = 1

Found = dict[str, Any]
"""gradients, metrics (of each step), scores, weights: of one scenario, as one rank has them."""
Scenario = Callable[[Ranks, list[int]], Found]


def few_kv_heads() -> Any:
    """A model with fewer key and value heads than there are ranks."""
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def model_of(name: str, ranks: Ranks) -> Any:
    """Rank 0 has the weights; others only know the architecture."""
    if ranks.rank:
        with torch.device("meta"):
            return few_kv_heads() if name == "few kv heads" else build(name)
    if name == "few kv heads":
        torch.manual_seed(0)
        return few_kv_heads()
    return build(name)


def rows(seed: int = 0) -> Batch:
    """Six rows with all that the losses read."""
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    batch = Batch.from_rows(
        {
            "ids": [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS],
            "loss_mask": [(noise(n) < 0.7) & (torch.arange(n) > 0) for n in LENGTHS],
            "advantages": [2 * noise(n) for n in LENGTHS],
            "old_logprobs": [-4.5 + 0.3 * noise(n) for n in LENGTHS],
            "values": [noise(n) for n in LENGTHS],
            "value_targets": [noise(n) for n in LENGTHS],
        }
    )
    mask, session = batch.tokens["loss_mask"], batch.row_of_token
    totals = denominators(mask, session)
    batch.tokens["loss_weights"] = token_weights(mask, session, None, "token-mean", totals)
    return batch


def policy_loss(batch: Batch) -> LossFn:
    """The loss of a whole mini-batch."""
    num_tokens = int(batch.tokens["loss_mask"].sum())
    return PolicyLoss(token_loss=Vanilla(), num_tokens=num_tokens, entropy_coef=0.01)


def value_loss(batch: Batch) -> LossFn:
    """The critic's."""
    return ValueLoss(num_tokens=int(batch.tokens["loss_mask"].sum()), clip=None)


def train(
    ranks: Ranks,
    mine: list[int],
    *,
    model: str = "qwen3",
    critic: bool = False,
    num_steps: int = 1,
    poisoned_step: int | None = None,
    offloaded: bool = False,
    lora_rank: int = 0,
    **settings: Any,
) -> Found:
    """Take steps on this rank's rows; keep gradients as the optimizer sees them."""
    # Some gradients are 0 but for rounding (of gpt2's key biases, say). With AdamW's usual eps
    # those coordinates would move by the whole rate, where rounding alone says which way.
    given: dict[str, Any] = {"lr": 1e-2, "grad_clip": 0.0, "eps": 1e-3} | settings
    config = EngineConfig(**given)
    head = "value" if critic else "language"
    opened = model_of(model, ranks)
    adapters = attach_adapters(opened, LoraConfig(rank=lora_rank), seed=0) if lora_rank else None
    engine = FSDPEngine(opened, None, config, ranks=ranks, head=head, adapters=adapters)
    kept: dict[str, Tensor] = {}
    # The sharded parameters' hooks run after gradients have been summed over ranks.
    hooks = [
        value.register_post_accumulate_grad_hook(lambda p, name=name: kept.update({name: p.grad}))
        for name, value in engine.model.named_parameters()
        if value.requires_grad
    ]
    metrics = []
    for step in range(num_steps):
        batch = rows(step)
        if step == poisoned_step:
            start = int(batch.cu_seqlens[POISONED_ROW])
            batch.tokens["advantages"][start : start + LENGTHS[POISONED_ROW]] = float("inf")
        loss = (value_loss if critic else policy_loss)(batch)
        part = batch.select(mine)
        metrics.append(engine.train_mini_batch(part, loss, tokens_per_micro_batch=BUDGET))
        if offloaded:
            engine.offload()
            engine.offload()
    gradients = {name: full_tensor(value).clone() for name, value in kept.items()}
    for hook in hooks:
        hook.remove()
    fields = ("values", "next_values") if critic else ("logprobs", "entropy")
    scores = engine.infer_batch(rows().select(mine), tokens_per_micro_batch=BUDGET, fields=fields)
    if lora_rank:
        without = engine.without_adapters()
        found = without.infer_batch(rows().select(mine), tokens_per_micro_batch=BUDGET)
        scores["without adapters"] = found["logprobs"]
    weights = {name: value.clone() for name, value in engine.export_params()}
    return {"gradients": gradients, "metrics": metrics, "scores": scores, "weights": weights}


STEPS: dict[str, Any] = {"num_steps": 3, "grad_clip": 0.5, "weight_decay": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "steps": STEPS,
    "offloaded steps": STEPS | {"offload": Offload.all, "offloaded": True},
    "poisoned": STEPS | {"poisoned_step": 1},
    "critic": {"critic": True, "num_steps": 3, "model": "llama"},
    "tied llama": {"model": "llama-rope3"},
    "gpt2": {"model": "gpt2"},
    "bf16": {"precision": Precision.bf16, "num_steps": 2},
    "adapters": STEPS | {"lora_rank": 4},
}
"""What is tried with uneven rows."""
SHARING: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama"},
    "grouped heads": {"model": "qwen2"},
    "fewer kv heads than ranks": {"model": "few kv heads"},
    "critic": {"critic": True, "num_steps": 3, "model": "llama"},
    "steps": STEPS | {"model": "qwen3-untied"},
    "adapters": STEPS | {"lora_rank": 4, "model": "qwen2"},
}
"""What is tried on ranks that share their rows."""


def scenarios() -> dict[str, tuple[Scenario, tuple[list[int], list[int]], dict[str, Any]]]:
    """Return name -> what ranks do, the rows of each, and what one process would do."""
    found = {}
    for layout, settings in LAYOUTS.items():
        for split, parts in SPLITS.items():
            found[f"{layout}, {split}"] = (partial(train, **settings), parts, {})
    for name, settings in VARIANTS.items():
        found[f"uneven rows, {name}"] = (partial(train, **settings), SPLITS["uneven"], settings)
    for name, settings in SHARING.items():
        shared = partial(train, sequence_parallel=2, **settings)
        found[f"shared rows, {name}"] = (shared, SHARED, settings)
    return found


def main(directory: Path, rank: int) -> None:
    """Run every scenario on one of the ranks."""
    torch.set_num_threads(1)
    ranks = join_ranks(
        (directory / "rendezvous").as_uri(),
        rank=rank,
        world_size=WORLD_SIZE,
        device="cpu",
        timeout_s=DEADLINE_S / 2,
    )
    found = {name: run(ranks, parts[rank]) for name, (run, parts, _) in scenarios().items()}
    engine = FSDPEngine(model_of("llama-rope3", ranks), None, EngineConfig(), ranks=ranks)
    engine.export_pretrained(directory / "exported")
    torch.save(found, directory / f"found_{rank}.pt")
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
