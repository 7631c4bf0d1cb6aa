"""A whole training run on the token clock: only model, tool and optimizer are fake.

Agent loop, groups, producer, buffer and trainer are the real code; the virtual time that a run
takes says what its schedule is worth.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from agentrl.agent.renderer import Renderer
from agentrl.algo.config import CreditConfig
from agentrl.bench.schedule_arms import Schedule, generate_by
from agentrl.bench.schedule_floor import WorkDone
from agentrl.bench.short_episodes import ShortEpisodes
from agentrl.dist.engine import TrainEngine
from agentrl.env.config import EnvConfig
from agentrl.env.entries import EnvEntry
from agentrl.rollout.buffer import Lookahead, RolloutBuffer, Verdict
from agentrl.rollout.config import FailureConfig, RolloutConfig
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.groups import GroupPlan, GroupRunner, RunSample
from agentrl.rollout.producer import Producer
from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.replica_set import ReplicaSet
from agentrl.rollout.stage import open_stage
from agentrl.rollout.tasks import TaskStream
from agentrl.rollouts import OneOwner
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.run_dir import RunDir
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.testing.clock_env import ClockEnv
from agentrl.testing.token_clock import ClockEngine, ClockSettings
from agentrl.testing.virtual_time import sleep
from agentrl.tool.binding import Toolbox
from agentrl.train.assemble import TrainBatch, assemble
from agentrl.train.compute_thread import ComputeThread
from agentrl.train.config import TrainerConfig
from agentrl.train.evaluate import Evaluator
from agentrl.train.progress import Progress
from agentrl.train.trainer import Trainer

ENV = "clock"
NEVER_S = 1e6
"""Deadlines of a run in which nothing hangs: virtual seconds cost nothing."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ClockedRun:
    """What is run."""

    prompts_per_step: int = 16
    num_samples: int = 8
    num_steps: int = 12
    lookahead: Lookahead | None = None
    """None: ``max_staleness=0``."""
    update_s: float = 0.5
    """Of the optimizer's part of a step."""
    engine: ClockSettings = field(default_factory=ClockSettings)
    num_replicas: int = 1
    interrupt: bool = True
    """Weight updates abort turns, which go on afterwards."""
    env: dict[str, Any] = field(default_factory=dict)
    """Arguments of :class:`~agentrl.testing.clock_env.ClockEnv`."""
    concurrency: int = 1_000_000
    """Episodes in flight at once, if the lookahead allows it."""
    max_requests: int = 1_000_000
    """Requests that a replica is given at once; those beyond its slots wait there."""
    short_episodes: bool = False
    """Play only what an engine and a buffer see of an episode: for scales at which the agent loop's
    own work, the same for every turn, would take hours."""
    schedule: Schedule = Schedule.ASYNC
    """Others need ``short_episodes``, and no lookahead."""
    limits: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            max_turns=64,
            max_turn_tokens=1_000_000,
            max_response_tokens=10_000_000,
            max_context_tokens=20_000_000,
            trajectory_timeout_s=NEVER_S,
        )
    )


@dataclass(slots=True, kw_only=True)
class ClockedResult:
    """What came out."""

    seconds: float
    """Virtual, from the first dispatch to the end of the last step."""
    lines: list[dict[str, Any]]
    """Metrics of every step; ``timing_s/*`` are virtual."""
    work: WorkDone
    """What was sampled."""
    optimum_s: float
    """In which the same could have been done."""
    busy_s: float
    """Seconds in which a replica had work, mean over replicas."""

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        return self.seconds / len(self.lines)

    @property
    def over_optimum(self) -> float:
        """The time it took, as a multiple of the optimum."""
        return self.seconds / self.optimum_s

    @property
    def staleness(self) -> float:
        """The most versions that a trained token lagged behind."""
        return max(line["staleness/max"] for line in self.lines)


async def train_on_clock(run: ClockedRun, directory: Path) -> ClockedResult:
    """Train as ``run`` says. Call it with ``run_virtual``.

    Args:
        directory: where the run directory is made; hardly anything is written.
    """
    loop = asyncio.get_running_loop()
    engines: list[ClockEngine] = []

    def spawn(number: int) -> RolloutEngine:
        engines.append(ClockEngine(run.engine))
        return engines[-1]

    serving = ServingConfig(
        max_requests=run.max_requests,
        request_timeout_s=NEVER_S,
        health_interval_s=NEVER_S,
        interrupt_updates=run.interrupt,
    )
    replicas = ReplicaSet(spawn, run.num_replicas, serving)
    await replicas.start()
    work = WorkDone(run.engine, ClockEnv(**run.env).latency_s)
    parts = FakeParts(replicas, work, update_s=run.update_s)
    try:
        async with _trainer(run, replicas, parts, directory) as trainer:
            started_s = loop.time()
            await trainer.fit()
            seconds = loop.time() - started_s
    finally:
        await replicas.close()
    return ClockedResult(
        seconds=seconds,
        lines=parts.lines,
        work=parts.work,
        optimum_s=parts.work.optimum_s(
            num_replicas=run.num_replicas, updates_s=[run.update_s] * run.num_steps
        ),
        busy_s=sum(engine.counts.busy_s for engine in engines) / len(engines),
    )


@asynccontextmanager
async def _trainer(
    run: ClockedRun, engine: RolloutEngine, parts: FakeParts, directory: Path
) -> AsyncIterator[Trainer]:
    """Build a trainer of real parts but for those of ``parts``."""
    rules = run.lookahead or Lookahead(prompts_per_step=run.prompts_per_step)
    config = EnvConfig(
        id=f"{ClockEnv.__module__}:{ClockEnv.__name__}",
        kwargs=run.env,
        step_timeout_s=NEVER_S,
    )
    tasks = ClockEnv(**run.env).tasks("train")
    feed = TaskFeed(TaskStream(tasks, seed=0, source=ENV))
    buffer = RolloutBuffer(rules)
    compute = ComputeThread()
    try:
        async with open_stage(
            entry=EnvEntry(name=ENV, config=config),
            toolbox=Toolbox(()),
            rollout=run.limits,
            renderer=Renderer(make_tokenizer()),
            engine=engine,
            sandboxes=FakeSandboxes(),
        ) as stage:
            groups = GroupRunner(
                _short(run, engine) if run.short_episodes else stage.play,
                GroupPlan(purpose="train", num_samples=run.num_samples, temperature=1.0),
                env_id=ENV,
                failure=FailureConfig(),
                seed=0,
                concurrency=asyncio.Semaphore(run.concurrency),
                policy_version=lambda: engine.policy_version,
            )
            yield Trainer(
                config=TrainerConfig(
                    prompts_per_step=run.prompts_per_step,
                    total_steps=run.num_steps,
                    eval_every=0,
                    trajectories="none",
                ),
                failure=FailureConfig(),
                collect_timeout_s=NEVER_S,
                max_refills=0,
                progress=Progress(),
                engines={"actor": cast(TrainEngine, parts)},
                learner=parts,
                weights=parts,
                placement=OneOwner(),
                feed=feed,
                producer=Producer(
                    feed, buffer, groups.run, lambda group: Verdict.TRAINABLE, groups.cut
                ),
                buffer=buffer,
                assemble=parts.assemble,
                evaluator=Evaluator(
                    _no_evaluation, {}, every=0, total_steps=run.num_steps, stall_timeout_s=NEVER_S
                ),
                checkpoints=parts,
                run_dir=RunDir.create(directory / "run"),
                tracker=parts,
                meter=Meter(clock=asyncio.get_running_loop().time),
                compute=compute,
            )
    finally:
        compute.close()


def _short(run: ClockedRun, engine: RolloutEngine) -> RunSample:
    generate = generate_by(
        run.schedule,
        engine.generate,
        batch=run.engine.num_slots * run.num_replicas,
        parties=run.prompts_per_step * run.num_samples,
    )
    return ShortEpisodes(generate, engine.end_session, run.env).play


class FakeParts:
    """Everything of a run that computes or writes: it takes virtual time, or none.

    As the engine of ``actor`` it has trained; as learner an update takes ``update_s``; as weights
    it updates the rollout engine.
    """

    num_updates, num_skipped = 1, 0

    def __init__(self, engine: RolloutEngine, work: WorkDone, *, update_s: float) -> None:
        self.lines: list[dict[str, Any]] = []
        self.work = work
        self._engine = engine
        self._update_s = update_s

    async def publish(self, *, version: int) -> dict[str, Any]:
        """Update the engine's weights, of which there are none."""
        await self._engine.update_weights((), version)
        return {}

    def assemble(self, groups: Sequence[Any]) -> TrainBatch:
        """Count the work, and pack for real."""
        for group in groups:
            self.work.add(group.recorded)
        return assemble(groups, {ENV: CreditConfig()})

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, Any]]:
        """Leave the batch as it is."""
        return batch, {}

    def measure_mismatch(self, batch: TrainBatch, step: int) -> dict[str, Any]:
        """Find none."""
        return {}

    def update(self, train_batch: TrainBatch, step: int) -> dict[str, Any]:
        """Take the time of an update."""
        sleep(self._update_s)
        return {"actor/updates": 1}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def save(self, step: int, parts: Any, progress: Any, *, score: float | None) -> None:
        """Write nothing."""

    def flush(self) -> None:
        """Nothing is being written."""

    def offload(self) -> None:
        """Hold no device."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Keep the line of a step."""
        if step:
            self.lines.append(dict(metrics))

    def close(self) -> None:
        """Hold nothing."""


async def _no_evaluation(split: str, dispatch: Any) -> Any:
    raise AssertionError("nothing is evaluated")
