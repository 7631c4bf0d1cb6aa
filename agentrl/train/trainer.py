"""The loop: collect, assemble, update, publish. Synchronous is ``max_staleness=0``.

Three objects absorb what differs between synchronous and asynchronous training: the
:class:`~agentrl.rollout.buffer.RolloutBuffer` (how far sampling may run ahead), the
:class:`Placement` (who owns the device while weights are updated) and the weight sync. There is no
branch on the mode in the loop: episodes go on while it computes, as far as the buffer lets them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, TypeVar

from agentrl.dist.engine import TrainEngine
from agentrl.errors import Preempted, TrainingError
from agentrl.rollout.buffer import RolloutBuffer, Slot
from agentrl.rollout.config import FailureConfig
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.producer import Producer
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.metrics import rollout_metrics, staleness_metrics, throughput_metrics
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import Tracker
from agentrl.train.assemble import TrainBatch
from agentrl.train.compute_thread import ComputeThread
from agentrl.train.config import TrainerConfig
from agentrl.train.evaluate import Evaluator, held_out_success
from agentrl.train.guards import (
    count_empty_step,
    count_updates,
    refuse_mismatch,
    refuse_untrained,
    warn_of_mismatch,
)
from agentrl.train.parts import Checkpoints, Learner, Metrics, Placement, Weights
from agentrl.train.preemption import going_on, resume_command
from agentrl.train.progress import Progress
from agentrl.train.waiting import waiting_part
from agentrl.types import TrajectoryGroup

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Drives rollouts and updates until ``total_steps``. Takes finished parts."""

    config: TrainerConfig
    failure: FailureConfig
    collect_timeout_s: float
    max_refills: int
    """Groups without signal that one step may replace by others."""
    progress: Progress
    engines: Mapping[str, TrainEngine]
    """By role, ``actor`` among them; what a checkpoint holds."""
    learner: Learner
    weights: Weights
    placement: Placement
    feed: TaskFeed
    producer: Producer
    buffer: RolloutBuffer
    assemble: Callable[[Sequence[TrajectoryGroup]], TrainBatch]
    """Groups -> batch (pure; no model has seen it)."""
    evaluator: Evaluator
    checkpoints: Checkpoints
    run_dir: RunDir
    tracker: Tracker
    meter: Meter
    compute: ComputeThread

    def __post_init__(self) -> None:
        """Begin where ``progress`` stands."""
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._save_s = 0.0
        self._first_step = self.step
        self._saved_step = self.step  # what is resumed from, or 0: nothing to save yet
        self._line: list[Slot] = []  # sampled ahead of the last whole step

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
        await self.publish()
        if self.step == 0:
            self.tracker.log(await self.unless_stopped(self.evaluate()), 0)
        async with self.producer.running(start=self.progress.cursor):
            while self.step < self.config.total_steps:
                with self.meter.step(self.step + 1) as metrics:
                    groups = await self.unless_stopped(self.collect())
                    batch = await self.compute.run(self.assemble, groups)
                    async with self.placement.training():
                        batch = await self.assign_credit(batch, metrics)
                        metrics |= await self.train_on(batch, groups)
                    metrics |= self.describe(groups, batch)
                    metrics |= await self.advance()
                    held_out, failure = await self.evaluate_step()
                    metrics |= held_out
                    await self.record(groups, batch, step=self.step)
                # Of the checkpoint that was written between the step before and this one, if any.
                metrics["timing_s/save"], self._save_s = self._save_s, 0.0
                metrics |= throughput_metrics(metrics, trained_tokens=batch.num_tokens)
                self.tracker.log(metrics, self.step)
                await self.save_if_due(metrics, at_once=failure is not None)
                if failure is not None:
                    self.checkpoints.flush()
                    raise failure
                await self.buffer.advance(version=self.step)
        self.checkpoints.flush()
        refuse_untrained(self.engines["actor"])

    def request_stop(self, reason: str) -> None:
        """Ask :meth:`fit` to save the last whole step and end. Call it on the event loop.

        What is being sampled is given up at once; an update that has begun is finished.
        """
        self._stop_reason = reason
        self._stop.set()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` gives; give it up, save and end where a stop is requested.

        Raises:
            Preempted: it was.
        """
        done = await self._until_stopped(work)
        if done is not None:
            return done.result()
        await self.save_and_end()

    async def _until_stopped(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T] | None:
        """Return the finished task of ``work``; None where a stop was requested meanwhile."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            # Of what is done in time nothing is kept either: where groups are always ready, a stop
            # would else never be obeyed.
            failed = task.done() and (task.cancelled() or task.exception() is not None)
            return task if failed or not self._stop.is_set() else None
        finally:
            for waiting in (task, stop):
                waiting.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def save_and_end(self) -> NoReturn:
        """Save the last whole step, if there is one, and say where the run stands.

        Raises:
            Preempted: always.
        """
        if self.step > self._saved_step:
            await self.save(score=None)
        self.checkpoints.flush()
        run = self.run_dir.path
        raise Preempted(
            f"stopped by {self._stop_reason} after step {self.step} of {self.config.total_steps}; "
            f"{going_on(run, resume_command(run))}"
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
        self.feed.observe(groups)
        return groups

    async def assign_credit(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Turn rewards into advantages; needs models where the estimator or the KL does."""
        with self.meter.span("credit"):
            batch, found = await self.compute.run(self.learner.assign_credit, batch)
        metrics |= found
        return batch

    async def train_on(self, batch: TrainBatch, groups: Sequence[TrajectoryGroup]) -> Metrics:
        """Update critic and policy, or count a step that carries no signal for the policy.

        Raises:
            TrainingError: too many such steps, or too many non-finite gradients, in a row; or the
                policy that is trained is not the one that sampled, whose tokens are then on disk.
        """
        with self.meter.span("mismatch"):
            metrics = await self.compute.run(self.learner.measure_mismatch, batch, self.step)
        is_first = self.step == self._first_step
        await self.refuse_mismatch(groups, batch, metrics, is_first=is_first)
        if batch.is_empty:
            empty = count_empty_step(self.progress, self.failure, batch.why_empty)
            return metrics | {"actor/updates": 0, **empty}
        with self.meter.span("update"):
            metrics |= await self.compute.run(self.learner.update, batch, self.step)
        if not metrics["actor/updates"] and not metrics.get("critic/head_start"):
            rejected = "algo.correction rejected every token"
            why = batch.why_empty if batch.batch is None else rejected
            return metrics | count_empty_step(self.progress, self.failure, why)
        await self.refuse_mismatch(groups, batch, metrics, is_first=False)
        count_updates(self.progress, self.failure, metrics)
        return metrics | warn_of_mismatch(self.progress, self.failure, metrics)

    async def refuse_mismatch(
        self,
        groups: Sequence[TrajectoryGroup],
        batch: TrainBatch,
        metrics: Metrics,
        *,
        is_first: bool,
    ) -> None:
        """Stop where the trained policy is not the sampled one, with the step's tokens on disk.

        Raises:
            TrainingError: it is not.
        """
        try:
            refuse_mismatch(self.progress, self.failure, metrics, is_first=is_first)
        except TrainingError:
            await self.record(groups, batch, step=self.step + 1)
            raise

    async def advance(self) -> Metrics:
        """Publish the new weights: from here on the next version is sampled."""
        self.progress.step += 1
        with self.meter.span("sync"):
            return await self.publish()

    async def publish(self) -> Metrics:
        """Have the present weights sampled; engines then give up what they need not keep."""
        metrics = await self.weights.publish(version=self.step)
        for engine in self.engines.values():
            await self.compute.run(engine.offload)
        return metrics

    async def evaluate_step(self) -> tuple[Metrics, Exception | None]:
        """Measure the policy after a step, which is kept whatever comes of this.

        Returns:
            Metrics, none where a stop was requested meanwhile; and what the evaluation failed with.
        """
        if not self.evaluator.due(self.step):
            return {}, None
        try:
            if (done := await self._until_stopped(self.evaluate())) is not None:
                return done.result(), None
        except Exception as error:
            return {}, error
        logger.warning(
            "the evaluation after step %d is given up (%s): measure that policy with agentrl eval",
            self.step,
            self._stop_reason,
        )
        return {}, None

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
        played = [group for group in groups if not group.cut]
        return {
            "step": self.step + 1,
            "policy_version": self.step,
            **rollout_metrics(
                groups,
                trained_ids=batch.trained_ids,
                refilled=len(played) - self.config.prompts_per_step,
            ),
            **staleness_metrics((t for group in played for t in group.trajectories), self.step),
            **self.feed.metrics(),
        }

    async def record(
        self, groups: Sequence[TrajectoryGroup], batch: TrainBatch, *, step: int
    ) -> None:
        """Write the trajectories of ``step``, failed and retried ones too."""
        with self.meter.span("record"):
            await self.compute.run(
                self.run_dir.write_trajectories,
                step,
                [trajectory for group in groups for trajectory in group.recorded],
                advantages=batch.advantages,
                trainer_logprobs=batch.trainer_logprobs,
                sampling=self.config.trajectories,
            )

    async def save_if_due(self, metrics: Metrics, *, at_once: bool) -> None:
        """Note where the run stands, and save that where due, or ``at_once``.

        Metrics and trajectories of the step are on disk by then.
        """
        self.progress.learner = self.learner.state_dict()
        self.progress.feed = self.feed.state_dict()
        self.progress.cursor = self.producer.cursor
        self._line = self.buffer.line
        last = self.step == self.config.total_steps
        every = self.config.save_every
        if at_once or last or (every and self.step % every == 0):
            await self.save(score=held_out_success(metrics))

    async def save(self, *, score: float | None) -> None:
        """Begin to write a checkpoint of the last whole step."""
        started = time.perf_counter()
        parts = {**self.engines, **waiting_part(self._line)}
        progress = asdict(self.progress)
        await self.compute.run(self.checkpoints.save, self.step, parts, progress, score=score)
        self._save_s, self._saved_step = time.perf_counter() - started, self.step
