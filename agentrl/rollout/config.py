"""Settings of the rollout side: sampling, limits of a trajectory, what to do with failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentrl.agent.limits import LoopLimits
from agentrl.rollout.serving.config import ServingConfig


@dataclass(slots=True, kw_only=True)
class PartConfig:
    """A pluggable part: a registered id (or import path) and its arguments."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TreeConfig:
    """Episodes of a group that share prefixes, for estimators that compare branches.

    A group has ``trunks`` episodes that are played from the start. The other members are dealt to
    their trees and to the rounds as evenly as whole numbers allow. Each begins at a state in which
    the model spoke, drawn with equal chances from all those that its tree holds when the round
    begins, and is played from there to its end.
    """

    rounds: int = 0
    """Rounds of branching: a later one branches from the episodes of earlier ones too. 0 is off:
    every episode is played from the start."""
    trunks: int = 2
    """Trees of a group, each of which begins with one whole episode."""

    def problem(self, num_samples: int) -> str | None:
        """Return why a group of ``num_samples`` cannot be sampled in this way; None if it can."""
        if self.rounds < 0 or self.trunks < 1:
            return (
                f"rollout.tree.rounds={self.rounds}, rollout.tree.trunks={self.trunks}: rounds "
                "must be at least 0 and trunks at least 1"
            )
        fewest = self.trunks + max(self.trunks, self.rounds)
        if self.rounds and num_samples < fewest:
            return (
                f"rollout.n={num_samples} with rollout.tree.rounds={self.rounds} and "
                f"rollout.tree.trunks={self.trunks}: every tree and every round needs a branch; "
                f"raise rollout.n to at least {fewest}, or lower the others"
            )
        return None


class Stragglers(StrEnum):
    """What becomes of prompts that are slower than others. Named as written in a config."""

    carry = "carry"
    """They are waited for, in this step or, within ``max_staleness``, in a later one: every prompt
    is trained."""
    cut = "cut"
    """Those that no step can train any more are ended and not trained, which favours prompts with
    short episodes; what was cut is counted (``cut/*``) and recorded."""


@dataclass(slots=True, kw_only=True)
class RolloutConfig(LoopLimits):
    """How trajectories are sampled; the limits of an episode stand in the base class."""

    engine: PartConfig = field(default_factory=lambda: PartConfig(id="hf"))
    """What samples: an id of a rollout engine, and its ``kwargs``."""
    n: int = 8
    """Samples per prompt: the size of a group."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """Whether the samples of a prompt branch off from each other."""
    temperature: float = 1.0
    """Of sampling; the log-probabilities trained on are those at this temperature."""
    top_p: float = 1.0
    """Nucleus sampling; training refuses anything but 1."""
    top_k: int = 0
    """Most likely tokens to sample from, 0 for all; training refuses anything but 0."""
    reward_timeout_s: float = 30.0
    """For grading one finished episode."""
    collect_timeout_s: float = 1800.0
    """For all the trajectories of one step, and for the next ones of an evaluation; then the run
    stops and says what was missing."""
    max_staleness: int = 0
    """Policy versions a trajectory may lag behind the one it trains, by its oldest token. 0 is
    on-policy."""
    oversubscribe: int | None = None
    """Prompts sampled beyond those of the present step. What a step does not take is the next
    one's (``stragglers=carry``) or given up (``cut``). None: as many as ``max_staleness`` allows,
    which is ``max_staleness * trainer.prompts_per_step``; fewer make fresher samples."""
    window: int = 0
    """Unfinished prompts that a finished one may overtake, as far as all of them can still be
    trained within ``max_staleness``. 0: strictly in order, so that a slow one holds up the rest."""
    stragglers: Stragglers = Stragglers.carry
    """What becomes of prompts that are not finished when a step has what it takes."""
    serving: ServingConfig = field(default_factory=ServingConfig)
    """How requests are spread over engines, and what becomes of lost ones."""
    concurrency: int = 256
    """Trajectories in flight at once, in all processes together."""
    workers: int = 1
    """Processes that play episodes, each with an engine, environments, tools and sandboxes of its
    own; more than one needs ``cluster=ray``."""
    replicas_per_gpu: int = 1
    """Engines that each of these processes runs on its device. Two are faster than one for models
    below a billion parameters, where the engine's own CPU side is the limit; ``rollout=hf`` has
    one."""
    tensor_parallel: int = 1
    """GPUs that one engine is split over."""
    gpu_memory_fraction: float = 0.4
    """Of a GPU's memory that all engines on it take together: weights, KV cache and workspaces.
    ``rollout=hf`` takes what its slots need."""
    sleep_level: int | None = None
    """What engines on a GPU that also trains give up while it does: 0 nothing, 1 the KV cache (the
    weights move to host memory), 2 the weights too, which the next weight sync brings back. None: 2
    where engine and training do not fit beside each other, else 0. Where sampling runs ahead
    (``max_staleness``, ``oversubscribe``) engines cannot sleep."""

    def __post_init__(self) -> None:
        """Leave the limits to ``validate``, which names every problem of a run at once."""

    @property
    def runs_ahead(self) -> bool:
        """Whether prompts are being sampled while a step trains."""
        return bool(self.max_staleness if self.oversubscribe is None else self.oversubscribe)


class FailurePolicy(StrEnum):
    """What happens to a group when a member fails for reasons that are not the model's.

    Members are named as they are written in a config.
    """

    retry_fresh = "retry_fresh"
    """Run the member again, with a new environment and seed, at most ``k`` times; then mask it."""
    min_group = "min_group"
    """Train on the survivors if there are at least ``k``, else drop the group."""
    mask = "mask"
    """Keep the row for the record; it neither trains nor enters the baseline."""
    drop_group = "drop_group"
    """One failure drops the whole group."""
    fail_fast = "fail_fast"
    """The first failure ends the run."""


@dataclass(slots=True, kw_only=True)
class FailureConfig:
    """The failure policy, and how long a run may go on without learning."""

    policy: FailurePolicy = FailurePolicy.retry_fresh
    """What happens to a group when a member fails for reasons that are not the model's."""
    k: int = 2
    """For ``retry_fresh``: retries of a member. For ``min_group``: the fewest survivors to train
    on."""
    max_empty_steps: int = 10
    """Steps in a row without one trainable group before the run stops."""
    max_skipped_updates: int = 5
    """Updates in a row with a non-finite gradient before the run stops."""
    max_start_mismatch: float = 1.15
    """Mean ``exp(|difference of log-probabilities|)`` of engine and trainer at the first step of a
    process, before it updates anything (``mismatch/exp_abs_mean``); above it the run stops. Both
    hold the same weights then. Exactly 1 where they agree; rounding gives 1.000001 in float32,
    1.01 to 1.05 in bfloat16, 1.1 with an engine in 8 bits. 1 allows no difference at all."""
    warn_mismatch: float = 1.05
    """A bound on the same at every step, of the tokens that the present version sampled; above it
    a warning is logged, once a run, and counted (``mismatch/warnings``)."""
    max_mismatch_kl: float = 0.5
    """KL per token, in nats, from the policy that the engine sampled with to that of the trainer
    before a step's first update (``mismatch/k3_kl``), of the tokens that the present version
    sampled; above it the run stops. Rounding gives 1e-8 in float32 and up to 1e-2 in bfloat16;
    1e-6 is a strict setting for float32. What the policy learned since older tokens were sampled
    is no mismatch: ``algo.correction`` bounds that."""
