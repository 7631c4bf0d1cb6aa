"""The same episodes on the configured engine, under three schedules, through the agent loop.

Lengths of turns come from a stored table, by the seed of the request, and so do the latencies of
the environment: every arm does the same work to the token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.bench.fixed_work import FixedWork
from agentrl.bench.machine import BenchError
from agentrl.bench.results import Arm, interleaved, refuse_unequal_work
from agentrl.bench.schedule_arms import Schedule, generate_by
from agentrl.bench.schedule_floor import WorkDone
from agentrl.config.schema import Config
from agentrl.plan import make_plan
from agentrl.playground import open_playground
from agentrl.rollout.groups import Sample
from agentrl.rollout.stage import Stage
from agentrl.seeding import derive_seed
from agentrl.testing.clock_env import ClockEnv
from agentrl.testing.decode_time import Device, EngineCost, ModelShape
from agentrl.testing.tables import Table, lognormal
from agentrl.testing.token_clock import ClockSettings
from agentrl.types import GenerateFn, GenerateRequest, Generation, Task, Trajectory

LENGTH_TAIL = 10.0
"""p99 of a turn's length over its median."""


@dataclass(slots=True, frozen=True)
class ForcedLengths:
    """Cuts every turn at the length that a table has for its seed."""

    generate: GenerateFn
    lengths: Table
    most: int

    async def __call__(self, request: GenerateRequest) -> Generation:
        """Generate one turn of that length."""
        sampling = request.sampling
        length = max(min(int(self.lengths.at(sampling.seed)), self.most), 1)
        cut = replace(sampling, max_tokens=min(length, sampling.max_tokens))
        return await self.generate(replace(request, sampling=cut))


async def measure_rollouts(
    work: FixedWork,
    policy: Path,
    *,
    settings: Sequence[str],
    batch: int,
    repeats: int,
    shape: ModelShape,
    device: Device,
    announce: Callable[[str], None] = lambda text: None,
) -> tuple[list[Arm], float]:
    """Play the episodes of a step ``repeats`` times under every schedule, after one warm-up.

    Args:
        batch: requests of a call in the arm ``batch``.
        shape, device: for the floor.

    Returns:
        the arms, and the seconds that the work takes at least.

    Raises:
        BenchError: episodes failed, or arms did different work.
    """
    config = work.config(policy, policy / "run", settings)
    arms = {schedule: Arm(schedule) for schedule in Schedule}
    latency_s = ClockEnv(**work.env_kwargs()).latency_s
    floor_s = 0.0
    async with _stage(config) as stage, _schedules(stage, work, batch=batch) as play:
        await play(Schedule.ASYNC, seed=-1)
        for number, name in enumerate(interleaved(list(Schedule), repeats)):
            start = time.perf_counter()
            played = await play(Schedule(name), seed=number // len(Schedule))
            seconds = time.perf_counter() - start
            refuse_failed(played)
            tokens = sum(trajectory.num_sampled_tokens for trajectory in played)
            turns = sum(len(trajectory.turns) for trajectory in played)
            arms[Schedule(name)].add(seconds, {"tokens": tokens, "turns": turns})
            announce(f"{name}: {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")
            if number < len(Schedule):
                floor_s = _floor(played, latency_s, shape, device, config, work)
    found = list(arms.values())
    refuse_unequal_work(found)
    return found, floor_s


Play = Callable[..., Any]


@asynccontextmanager
async def _stage(config: Config) -> AsyncIterator[Stage]:
    """Open the engine, and the stage on which the environment plays."""
    plan = make_plan(config)
    async with open_playground(config, plan.environments, examples=plan.examples) as ground:
        yield ground.stages[0]


@asynccontextmanager
async def _schedules(stage: Stage, work: FixedWork, *, batch: int) -> AsyncIterator[Play]:
    """Yield what plays all episodes of a step under a schedule."""
    tasks = ClockEnv(**work.env_kwargs()).tasks("train")[: work.prompts]
    engine_generate = stage.loop.generate
    table = lognormal(median=work.turn_tokens / LENGTH_TAIL * 2, p99=work.turn_tokens * 2)
    forced = ForcedLengths(engine_generate, table, work.turn_tokens)

    async def play(schedule: Schedule, *, seed: int) -> list[Trajectory]:
        stage.loop.generate = generate_by(
            schedule, forced, batch=batch, parties=work.num_trajectories
        )
        samples = [_sample(task, index, seed) for task in tasks for index in range(work.samples)]
        return list(await asyncio.gather(*(stage.play(sample) for sample in samples)))

    try:
        yield play
    finally:
        stage.loop.generate = engine_generate


def _sample(task: Task, index: int, seed: int) -> Sample:
    return Sample(
        task=task,
        group_id=f"bench{seed}-{task.id}",
        sample_index=index,
        attempt=0,
        seed=derive_seed(seed, task.id, index),
        temperature=1.0,
    )


def refuse_failed(played: Sequence[Trajectory]) -> None:
    """Refuse to time episodes that failed.

    Raises:
        BenchError: with the first error.
    """
    failed = [trajectory for trajectory in played if trajectory.failed]
    if failed:
        raise BenchError(
            f"{len(failed)} of {len(played)} episodes failed, the first with {failed[0].error}"
        )


def _floor(
    played: Sequence[Trajectory],
    latency_s: Callable[[int, int], float],
    shape: ModelShape,
    device: Device,
    config: Config,
    work: FixedWork,
) -> float:
    """Return the optimum of one device that decodes all episodes at once."""
    slots = min(work.num_trajectories, config.rollout.concurrency)
    settings = ClockSettings(cost=EngineCost(shape, device), num_slots=slots)
    done = WorkDone(settings, latency_s)
    done.add(played)
    return done.optimum_s(num_replicas=1)


HEADERS = ("arm", "median s", "min", "max", "tokens/s", "speed-up", "of floor", "A vs A")


def rows(arms: Sequence[Arm], floor_s: float) -> list[list[Any]]:
    """Return a line per arm, the slowest first."""
    slowest = max(arm.median_s for arm in arms)
    return [
        [
            arm.name,
            arm.median_s,
            *arm.range_s,
            sum(done["tokens"] for done in arm.work) / sum(arm.seconds),
            slowest / arm.median_s,
            floor_s / arm.median_s,
            arm.halves_differ,
        ]
        for arm in sorted(arms, key=lambda arm: -arm.median_s)
    ]
