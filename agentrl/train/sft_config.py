"""Settings of supervised training. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum

from agentrl.dist.cluster_config import address_problems
from agentrl.dist.config import (
    EngineConfig,
    LoraConfig,
    OptimizerConfig,
    PoolConfig,
    Precision,
    Recompute,
    Schedule,
)
from agentrl.dist.layout import MAX_RANKS, layout_problems
from agentrl.dist.lora_checks import lora_problems
from agentrl.dist.optimizer_checks import optimizer_problems
from agentrl.dist.placement import pool_problems

FOLDER = "sft"
"""In the directory of the model: everything about its training."""
LAST_FILE = "config.json"
"""Without it a directory is no model: it is put in place last."""
LOCAL, RAY = "local", "ray"
_MAX_STEPS = 10**9


class Turns(StrEnum):
    """What of a conversation is learned. Named as written."""

    all = "all"
    """Everything that assistants said."""
    last = "last"
    """What the assistant said last; its earlier turns are context."""


@dataclass(slots=True, kw_only=True)
class SFTConfig(OptimizerConfig):
    """Supervised training on conversations."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.98)
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = 20
    steps: int = 400
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the conversations, in place of ``steps``; the last step is a whole one."""
    episodes_per_step: int = 32
    """Conversations of one optimizer step, over all ranks."""
    tokens_per_micro_batch: int = 2048
    """Tokens of one forward and backward on one rank, packed. Changes memory and speed, never the
    gradient."""
    max_tokens: int = 1024
    """Longer conversations are left out and counted, never cut."""
    turns: Turns = Turns.all
    """Which turns of the assistant are learned; a message with ``"weight": 0`` never is."""
    messages_column: str = "messages"
    """The column that holds the conversation."""
    tools_column: str = "tools"
    """The column that holds the schemas of its tools; rows may lack it."""
    eval_every: int = 50
    """Steps between measurements of the loss on held-out conversations; 0 for the last only."""
    save_every: int = 0
    """Steps between checkpoints to resume from, of which the newest stays; 0 for none."""
    grace_s: float = 30.0
    """Seconds that SIGTERM leaves to save and end."""
    seed: int = 0
    """Decides the order of the conversations."""
    precision: Precision = Precision.fp32
    """Number format of forward and backward; weights and optimizer are always float32."""
    recompute: Recompute = Recompute.none
    """Gradient checkpointing."""
    compile: bool = False
    """Compile every layer with torch.compile."""
    shard_size: int = 0
    """Ranks over which weights are sharded; 0 shards over all of them."""
    sequence_parallel: int = 1
    """Ranks that share a sequence."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters in place of full fine-tuning; what is written at the end has them merged."""
    cluster: str = LOCAL
    """``local``: one process. ``ray``: ranks are processes of Ray's."""
    address: str | None = None
    """``host:port`` of a Ray cluster's head, or ``auto``; None starts Ray on this machine."""
    ranks: int = 1
    """Processes that train, with ``cluster=ray``."""
    gpus_per_rank: float = 0.0
    """GPUs of a rank with ``cluster=ray``: 0 or 1."""
    start_timeout_s: float = 300.0
    """For Ray and all ranks to be ready."""

    def engine_config(self) -> EngineConfig:
        """Return the settings of the engine that is trained."""
        own = {item.name for item in fields(self)}
        shared = [item.name for item in fields(EngineConfig) if item.name in own - {"epochs"}]
        return EngineConfig(**{name: getattr(self, name) for name in shared})

    def pool(self) -> PoolConfig:
        """Return what the ranks take of a cluster."""
        return PoolConfig(ranks=self.ranks, gpus_per_rank=self.gpus_per_rank)

    def num_steps(self, num_examples: int) -> int:
        """Return the optimizer steps of a run over ``num_examples`` conversations."""
        if self.epochs is None:
            return self.steps
        return max(math.ceil(self.epochs * num_examples / self.episodes_per_step), 1)

    def warmup_problems(self, num_steps: int) -> Iterator[str]:
        """Say that the learning rate would still be warming up when a run of ``num_steps`` ends."""
        if num_steps <= self.warmup_steps:
            length = "steps" if self.epochs is None else f"epochs={self.epochs:g}, which is steps"
            yield (
                f"warmup_steps={self.warmup_steps} with {length}={num_steps}: the learning rate "
                f"would not arrive at lr before the end; use at most {num_steps - 1}, or train "
                "longer"
            )

    def problems(self) -> Iterator[str]:
        """Say what cannot work, one line each."""
        at_least = {
            "episodes_per_step": 1,
            "tokens_per_micro_batch": 1,
            "max_tokens": 2,
            "eval_every": 0,
            "save_every": 0,
        }
        for name, least in at_least.items():
            if (value := getattr(self, name)) < least:
                yield f"{name}={value}: must be at least {least}"
        if self.epochs is None and not 1 <= self.steps <= _MAX_STEPS:
            yield f"steps={self.steps}: must be between 1 and {_MAX_STEPS:,}"
        elif self.epochs is None:
            yield from self.warmup_problems(self.steps)
        if self.epochs is not None and not 0 < self.epochs <= _MAX_STEPS:
            yield f"epochs={self.epochs}: must be a number above 0"
        if not 0 <= self.seed < 2**63:
            yield f"seed={self.seed}: must be between 0 and 2**63 - 1"
        for name in ("start_timeout_s", "grace_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                yield f"{name}={value}: must be a finite number above 0"
        yield from optimizer_problems(self, prefix="")
        yield from lora_problems(self.lora)
        if self.cluster not in (LOCAL, RAY):
            yield f"cluster={self.cluster!r}: write {LOCAL} or {RAY}"
        elif self.cluster == LOCAL and (self.ranks != 1 or self.address or self.gpus_per_rank):
            yield (
                f"ranks={self.ranks} gpus_per_rank={self.gpus_per_rank:g} address={self.address}: "
                "one process is all that cluster=local has; add cluster=ray"
            )
        yield from address_problems("address", self.address)
        yield from (item.replace("pool.", "") for item in pool_problems("pool", self.pool()))
        yield from (
            problem.replace("model.", "")
            for problem in layout_problems(
                "model",
                num_ranks=min(max(self.ranks, 1), MAX_RANKS),
                shard_size=self.shard_size,
                sequence_parallel=self.sequence_parallel,
                more_ranks="cluster=ray ranks",
            )
        )
