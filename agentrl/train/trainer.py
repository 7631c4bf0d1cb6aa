"""The loop: collect, assemble, update, publish. Synchronous is ``max_staleness=0``.

Three objects absorb what differs between synchronous and asynchronous training: the
:class:`~agentrl.rollout.buffer.RolloutBuffer` (how far sampling may run ahead), the
:class:`Placement` (who owns the device while weights are updated) and the weight sync. There is no
branch on the mode in the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

from agentrl.dist.engine import TrainEngine
from agentrl.errors import Preempted
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
from agentrl.train.guards import (
    count_empty_step,
    count_updates,
    refuse_mismatch,
    refuse_untrained,
)
from agentrl.train.parts import Checkpoints, Learner, Metrics, Placement, Weights
from agentrl.train.progress import Progress
from agentrl.types import Trajectory, TrajectoryGroup

T = TypeVar("T")


class Trainer:
    """Drives rollouts and updates until ``total_steps``. Takes finished parts.

    Args:
        engines: by role, ``actor`` among them; what a checkpoint holds.
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
        engines: Mapping[str, TrainEngine],
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
        self.engines = engines
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
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._save_s = 0.0
        self._saved_step = progress.step  # what is resumed from, or 0: nothing to save yet

    @property
    def step(self) -> int:
        """Updates done, which is the version of the policy."""
        return self.progress.step

    async def fit(self) -> None:
        """Train until ``total_steps``.

        Raises:
            TrainingError: no signal or non-finite gradients for too long, or a deadline passed.
            Preempted: :meth:`request_stop` was called; the last whole step is saved.
        """
        await self.weights.publish(version=self.step)
        if self.step == 0:
            self.tracker.log(await self.unless_stopped(self.evaluate()), 0)
        async with self.producer.running(start=self.progress.cursor):
            while self.step < self.config.total_steps:
                with self.meter.step(self.step + 1) as metrics:
                    groups = await self.unless_stopped(self.collect())
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
                self.save_if_due(metrics)
                await self.open_next_step()
        self.checkpoints.flush()
        refuse_untrained(self.engines["actor"])

    def request_stop(self, reason: str) -> None:
        """Ask :meth:`fit` to save the last whole step and end. Call it on the event loop.

        What is being collected is given up at once; an update that has begun is finished.
        """
        self._stop_reason = reason
        self._stop.set()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` gives; give it up, save and end where a stop is requested.

        Raises:
            Preempted: it was.
        """
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for waiting in (task, stop):
                waiting.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
        self.save_and_end()

    def save_and_end(self) -> NoReturn:
        """Save the last whole step, if there is one, and say where the run stands.

        Raises:
            Preempted: always.
        """
        if self.step > self._saved_step:
            self.save(score=None)
        self.checkpoints.flush()
        run = str(self.run_dir.path)
        raise Preempted(
            f"stopped by {self._stop_reason} after step {self.step} of {self.config.total_steps}; "
            f"go on with: agentrl train --resume {run}"
        )

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
        """Update critic and policy, or count a step that carries no signal for the policy.

        Raises:
            TrainingError: too many such steps, or too many non-finite gradients, in a row; the
                policy that is trained is not the one that sampled.
        """
        if batch.is_empty:
            empty = count_empty_step(self.progress, self.failure, batch.why_empty)
            return {"actor/updates": 0, **empty}
        with self.meter.span("update"):
            metrics = self.learner.update(batch, self.step)
        if not metrics["actor/updates"] and not metrics.get("critic/head_start"):
            rejected = "algo.correction rejected every token"
            why = batch.why_empty if batch.batch is None else rejected
            return metrics | count_empty_step(self.progress, self.failure, why)
        refuse_mismatch(self.progress, self.failure, metrics)
        count_updates(self.progress, self.failure, metrics)
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

    def save_if_due(self, metrics: Metrics) -> None:
        """Note where the run stands, and save that where due.

        Metrics and trajectories of the step are on disk by then.
        """
        self.progress.learner = self.learner.state_dict()
        self.progress.feed = self.feed.state_dict()
        last = self.step == self.config.total_steps
        every = self.config.save_every
        if last or (every and self.step % every == 0):
            self.save(score=held_out_success(metrics))

    def save(self, *, score: float | None) -> None:
        """Begin to write a checkpoint of the last whole step."""
        started = time.perf_counter()
        self.checkpoints.save(self.step, self.engines, asdict(self.progress), score=score)
        self._save_s, self._saved_step = time.perf_counter() - started, self.step


def held_out_success(metrics: Mapping[str, Any]) -> float | None:
    """Mean success over environments on the validation split; None where it was not measured."""
    found = [
        float(value)
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith("/success")
    ]
    return sum(found) / len(found) if found else None


def all_trajectories(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """Everything that was played for every group, in order."""
    return [trajectory for group in groups for trajectory in group.recorded]
