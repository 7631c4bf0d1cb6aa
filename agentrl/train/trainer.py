"""The loop: collect, assemble, update, publish. Synchronous is ``max_staleness=0``.

Three objects absorb what differs between synchronous and asynchronous training: the
:class:`~agentrl.rollout.buffer.RolloutBuffer` (how far sampling may run ahead), the
:class:`Placement` (who owns the device while weights are updated) and the weight sync. There is no
branch on the mode in the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from agentrl.dist.engine import TrainEngine
from agentrl.errors import TrainingError
from agentrl.rollout.buffer import RolloutBuffer
from agentrl.rollout.config import FailureConfig
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.producer import Producer
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.metrics import rollout_metrics, staleness_metrics, throughput_metrics
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import Tracker
from agentrl.train.assemble import TrainBatch
from agentrl.train.config import TrainerConfig
from agentrl.train.evaluate import Evaluator
from agentrl.types import Trajectory, TrajectoryGroup

Metrics = dict[str, Any]


class Weights(Protocol):
    """Carries the policy from the training engine to whoever samples it."""

    async def publish(self, *, version: int) -> Metrics:
        """Return once ``version`` is what is sampled.

        Raises:
            EngineError: the served weights are not those that were sent.
        """
        ...


class Placement(Protocol):
    """Who owns the device."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Hold the device for an update: a colocated engine sleeps meanwhile."""
        ...


class Learner(Protocol):
    """The algorithm of one step."""

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Return the rows that train, with advantages, and metrics."""
        ...

    def update(self, train_batch: TrainBatch, step: int) -> Metrics:
        """Make the optimizer steps; returns their metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs beyond the engine's own state."""
        ...


class Checkpoints(Protocol):
    """Atomic snapshots of a run, by step."""

    def save(self, step: int, engine: dict[str, Any], progress: dict[str, Any]) -> None:
        """Write a complete checkpoint, or none.

        Raises:
            CheckpointError: it could not be written; earlier ones are intact.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands: with the engine's state, all that resuming needs."""

    step: int = 0
    cursor: int = 0
    """Index in the stream of prompts of the next one to be trained."""
    empty_steps: int = 0
    """Steps in a row without a trainable signal."""
    skipped_updates: int = 0
    """Updates in a row with a non-finite gradient."""
    learner: dict[str, Any] = field(default_factory=dict)
    """State of the learner, such as an adaptive KL coefficient."""
    feed: dict[str, Any] = field(default_factory=dict)
    """State of the feed of prompts: which tasks, and what the curriculum knows of them."""


class Trainer:
    """Drives rollouts and updates until ``total_steps``. Takes finished parts.

    Args:
        assemble: groups -> batch (pure; no model has seen it).
        max_refills: groups without signal that one step may replace by others.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        failure: FailureConfig,
        collect_timeout_s: float,
        max_refills: int,
        progress: Progress,
        actor: TrainEngine,
        learner: Learner,
        weights: Weights,
        placement: Placement,
        feed: TaskFeed,
        producer: Producer,
        buffer: RolloutBuffer,
        assemble: Callable[[Sequence[TrajectoryGroup]], TrainBatch],
        evaluator: Evaluator,
        checkpoints: Checkpoints,
        run_dir: RunDir,
        tracker: Tracker,
        meter: Meter,
    ) -> None:
        self.config = config
        self.failure = failure
        self.collect_timeout_s = collect_timeout_s
        self.max_refills = max_refills
        self.progress = progress
        self.actor = actor
        self.learner = learner
        self.weights = weights
        self.placement = placement
        self.feed = feed
        self.producer = producer
        self.buffer = buffer
        self.assemble = assemble
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.run_dir = run_dir
        self.tracker = tracker
        self.meter = meter
        self._save_s = 0.0

    @property
    def step(self) -> int:
        """Updates done, which is the version of the policy."""
        return self.progress.step

    async def fit(self) -> None:
        """Train until ``total_steps``.

        Raises:
            TrainingError: no signal or non-finite gradients for too long, or a deadline passed.
        """
        await self.weights.publish(version=self.step)
        if self.step == 0:
            self.tracker.log(await self.evaluate(), 0)
        async with self.producer.running(start=self.progress.cursor):
            while self.step < self.config.total_steps:
                with self.meter.step(self.step + 1) as metrics:
                    groups = await self.collect()
                    batch = self.assemble(groups)
                    async with self.placement.training():
                        batch = self.assign_credit(batch, metrics)
                        metrics |= self.train_on(batch)
                    metrics |= self.describe(groups, batch)
                    metrics |= await self.advance()
                    metrics |= await self.evaluate()
                    self.record(groups, batch)
                metrics["timing_s/save"] = self._save_s  # of the checkpoint before this step
                metrics |= throughput_metrics(metrics, trained_tokens=batch.num_tokens)
                self.tracker.log(metrics, self.step)
                self.save_if_due()
                await self.open_next_step()
        self._refuse_untrained()

    async def collect(self) -> list[TrajectoryGroup]:
        """Take the step's groups, oldest first; untrainable ones come along as data."""
        with self.meter.span("collect"):
            groups = await self.buffer.take(
                self.config.prompts_per_step,
                timeout_s=self.collect_timeout_s,
                max_rejected=self.failure.max_empty_steps * self.config.prompts_per_step,
                max_refills=self.max_refills,
            )
        self.progress.cursor = groups[-1].index + 1
        self.feed.observe(groups)
        return groups

    def assign_credit(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Turn rewards into advantages; needs models where the estimator or the KL does."""
        with self.meter.span("credit"):
            batch, found = self.learner.assign_credit(batch)
        metrics |= found
        return batch

    def train_on(self, batch: TrainBatch) -> Metrics:
        """Update the policy, or count a step that carries no signal.

        Raises:
            TrainingError: too many such steps, or too many non-finite gradients, in a row; the
                policy that is trained is not the one that sampled.
        """
        if batch.is_empty:
            return {"actor/updates": 0, **self._count_empty_step(batch.why_empty)}
        with self.meter.span("update"):
            metrics = self.learner.update(batch, self.step)
        if not metrics["actor/updates"]:
            return metrics | self._count_empty_step("algo.correction rejected every token")
        self.progress.empty_steps = 0
        skipped = int(metrics.get("actor/skipped_updates", 0))
        self._refuse_mismatch(metrics)
        finished = int(metrics["actor/updates"]) - skipped
        self.progress.skipped_updates = 0 if finished else self.progress.skipped_updates + skipped
        if self.progress.skipped_updates >= self.failure.max_skipped_updates:
            raise TrainingError(
                f"{self.progress.skipped_updates} updates in a row had a gradient that is not "
                f"finite (last step: {self.step + 1}); look at actor/loss, credit/* and mismatch/* "
                "in metrics.jsonl (a loss of your own?), and lower actor.lr or actor.grad_clip"
            )
        return metrics

    async def advance(self) -> Metrics:
        """Publish the new weights: from here on the next version is sampled."""
        self.progress.step += 1
        with self.meter.span("sync"):
            return await self.weights.publish(version=self.step)

    async def open_next_step(self) -> None:
        """Free the buffer's budget for the next step, which wakes the producer."""
        if self.step < self.config.total_steps:
            await self.buffer.advance(version=self.step)

    async def evaluate(self) -> Metrics:
        """Measure the policy where an evaluation is due, and store its trajectories."""
        splits = self.evaluator.due(self.step)
        if not splits:
            return {}
        with self.meter.span("eval"):
            metrics, trajectories = await self.evaluator.run(splits, step=self.step)
        self.run_dir.write_evaluation(self.step, trajectories)
        return metrics

    def describe(self, groups: Sequence[TrajectoryGroup], batch: TrainBatch) -> Metrics:
        """Metrics of what was sampled, failures and retries included."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        return {
            "step": self.step + 1,
            "policy_version": self.step,
            **rollout_metrics(
                groups,
                trained_ids=batch.trained_ids,
                refilled=len(groups) - self.config.prompts_per_step,
            ),
            **staleness_metrics(members, self.step),
            **self.feed.metrics(),
        }

    def record(self, groups: Sequence[TrajectoryGroup], batch: TrainBatch) -> None:
        """Write the step's trajectories, failed and retried ones too."""
        with self.meter.span("record"):
            self.run_dir.write_trajectories(
                self.step,
                all_trajectories(groups),
                advantages=batch.advantages,
                sampling=self.config.trajectories,
            )

    def save_if_due(self) -> None:
        """Save where due. Metrics and trajectories of the step are on disk by then."""
        last = self.step == self.config.total_steps
        every = self.config.save_every
        if last or (every and self.step % every == 0):
            self.progress.learner = self.learner.state_dict()
            self.progress.feed = self.feed.state_dict()
            started = time.perf_counter()
            self.checkpoints.save(self.step, self.actor.state_dict(), asdict(self.progress))
            self._save_s = time.perf_counter() - started

    def _refuse_mismatch(self, metrics: Metrics) -> None:
        """Stop where the trained policy is not the sampled one: ratios would mean nothing."""
        found, limit = metrics.get("mismatch/k3_kl", 0.0), self.failure.max_mismatch_kl
        if found > limit:
            raise TrainingError(
                f"before the update of step {self.step + 1} the trainer's policy was {found:.3g} "
                "nats per token from the one that the engine sampled with (largest difference of "
                f"a log-probability: {metrics.get('mismatch/logprob_abs_max', 0.0):.3g}), more "
                f"than failure.max_mismatch_kl={limit:g}: weights, temperature or precision "
                "differ; lower rollout.max_staleness, or raise the limit where that is meant"
            )

    def _count_empty_step(self, why: str) -> Metrics:
        """Count a step without anything to learn from.

        Raises:
            TrainingError: too many in a row.
        """
        self.progress.empty_steps += 1
        if self.progress.empty_steps >= self.failure.max_empty_steps:
            raise TrainingError(
                f"{self.progress.empty_steps} steps in a row had no group to learn from: {why}. "
                "Every sample of each prompt earned the same, failed, or was rejected; look at "
                "report.html, make tasks easier, raise rollout.n, or start from a better model"
            )
        return {"group/empty_steps": self.progress.empty_steps}

    def _refuse_untrained(self) -> None:
        """A run in which every single update was skipped is no success, however short."""
        if self.actor.num_skipped and not self.actor.num_updates:
            raise TrainingError(
                f"nothing was trained: all {self.actor.num_skipped} updates of the run had a "
                "gradient that is not finite; look at actor/loss, credit/* and mismatch/* in "
                "metrics.jsonl: at a loss of your own, at weights and coefficients, at actor.lr"
            )


def all_trajectories(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """Everything that was played for every group, in order."""
    return [trajectory for group in groups for trajectory in group.recorded]
