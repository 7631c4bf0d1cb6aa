"""Settings of training engines. Imports no torch, so that a command line can compose it fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

COMPILES = "compiling: the first step takes longer, on a CPU by minutes (compile=true)"
"""Said before an engine's first step, which would else be a silence without a reason."""


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


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass instead of kept."""

    none = "none"
    """Keeps all: fastest."""
    selective = "selective"
    """Keeps the results of matrix products and attention, recomputes the rest."""
    full = "full"
    """Keeps the input of every layer: least memory, about a third slower."""


class Offload(StrEnum):
    """What leaves the device while another phase has it."""

    none = "none"
    """Everything stays."""
    optimizer = "optimizer"
    """The optimizer's state waits in host memory but during updates."""
    all = "all"
    """Weights too, but while they are used."""


@dataclass(slots=True, kw_only=True)
class EngineConfig(OptimizerConfig):
    """How a model is trained: what the actor and the critic have in common."""

    precision: Precision = Precision.fp32
    """Number format of forward and backward; weights and optimizer are always float32."""
    updates_per_step: int = 1
    """Mini-batches (optimizer steps) per epoch over one step's batch, cut at sessions by tokens."""
    epochs: int = 1
    """Passes over one step's batch."""
    tokens_per_micro_batch: int = 8192
    """Tokens of one forward and backward on one rank. Changes memory and speed, never the
    gradient."""
    recompute: Recompute = Recompute.none
    """Gradient checkpointing."""
    offload: Offload = Offload.none
    """What leaves the device between phases."""
    compile: bool = False
    """Compile every layer and the vocabulary pass with torch.compile."""
    shard_size: int = 0
    """Ranks over which weights are sharded, copies of the shards being replicated over the others
    (HSDP); 0 shards over all of them."""
    sequence_parallel: int = 1
    """Ranks that share the attention heads of a sequence (Ulysses); divides the number of ranks and
    the number of heads."""


@dataclass(slots=True, kw_only=True)
class ActorConfig(EngineConfig):
    """How the policy is trained."""

    exact: bool = False
    """Compute in the very operations and shapes of ``rollout=hf``: the mismatch with the engine is
    then exactly 0, and the first ratio of a step exactly 1. For one process, float32, and a model
    that the engine's own decoder serves; about a third slower than packed rows."""


@dataclass(slots=True, kw_only=True)
class CriticConfig(EngineConfig):
    """How the critic is trained: there is one where the estimator asks for values."""

    lr: float = 1e-5
    """Peak learning rate."""
    path: str | None = None
    """What its trunk starts from, as ``model.path``; None: from the policy's own."""
    value_clip: float | None = 0.5
    """How far a prediction may move from where it was before the step, in units of the return; None
    for no bound."""
    head_start_steps: int = 0
    """Trainer steps (not optimizer steps) in which the critic learns alone, before the policy
    moves."""


@dataclass(slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft) of the policy, trained in place of its weights."""

    rank: int = 0
    """Of the adapters; 0 trains all weights."""
    alpha: float = 32.0
    """Adapters are scaled by ``alpha / rank``."""
    target_modules: str = "all-linear"
    """``all-linear`` (but the output embedding), or a regular expression over whole names of
    layers."""


@dataclass(slots=True, kw_only=True)
class PoolConfig:
    """Processes that hold the same roles."""

    ranks: int = 1
    """Processes; each has a GPU of its own where ``gpus_per_rank`` says so."""
    gpus_per_rank: float = 0.0
    """GPUs of a rank; 0 on CPU machines."""
    cpus_per_rank: float = 1.0
    """CPU cores that Ray reserves for a rank."""
    strategy: str = "PACK"
    """How Ray spreads the ranks over nodes: ``PACK``, ``SPREAD``, ``STRICT_PACK``,
    ``STRICT_SPREAD``."""


@dataclass(slots=True, kw_only=True)
class PlacementConfig:
    """Which role lives in which pool; roles of one pool share its processes."""

    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Name -> processes. The pool ``train`` is there without being named."""
    roles: dict[str, str] = field(default_factory=dict)
    """``actor``, ``critic``, ``reference``, ``reward_model`` -> pool; ``train`` where unnamed."""
