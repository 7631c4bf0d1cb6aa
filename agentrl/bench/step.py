"""A whole training step of fixed work, with an owner for every moment of it.

The run is an ordinary one: ``agentrl.launch`` builds it from settings. Only its meter, its
checkpoints and a wrapper around the policy's engine are the benchmark's.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from agentrl.bench.fixed_work import FixedWork
from agentrl.bench.machine import BenchError
from agentrl.bench.phases import (
    OTHER,
    PHASES,
    Interval,
    IntervalMeter,
    of_trajectory,
    shares,
)
from agentrl.bench.results import EQUAL_WORK
from agentrl.launch import open_trainer
from agentrl.testing.decode_time import Device, EngineCost, ModelShape
from agentrl.train.assemble import TrainBatch
from agentrl.train.compute_thread import ComputeThread
from agentrl.train.learner import Learner
from agentrl.train.parts import Metrics, Placement
from agentrl.train.trainer import Trainer
from agentrl.types import Trajectory, TrajectoryGroup

_NUM_TRACED_PASSES = 3
"""An update costs three forward passes: one forward, two backward."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Seconds of every step, by phase."""

    arm: str
    steps: list[dict[str, float]] = field(default_factory=list)
    """Phase -> seconds; they add up to the step's wall clock."""
    sampled_tokens: list[int] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    """All that goes through the model when it is trained, prompts included."""

    def median(self, phase: str) -> float:
        """Median seconds of a phase."""
        return statistics.median(step[phase] for step in self.steps)

    def extremes(self, phase: str) -> tuple[float, float]:
        """Shortest and longest of a phase."""
        values = [step[phase] for step in self.steps]
        return min(values), max(values)

    @property
    def wall_s(self) -> list[float]:
        """Of every step."""
        return [sum(step.values()) for step in self.steps]

    @property
    def unowned(self) -> float:
        """Share of the steps' time that nobody owns."""
        return sum(step[OTHER] for step in self.steps) / sum(self.wall_s)

    def extend(self, other: StepResult) -> None:
        """Add the steps of another run of the arm."""
        self.steps += other.steps
        self.sampled_tokens += other.sampled_tokens
        self.context_tokens += other.context_tokens


async def measure_steps(
    work: FixedWork,
    policy: Path,
    *,
    arm: str,
    settings: Sequence[str],
    steps: int,
    warmup: int,
    announce: Callable[[str], None] = lambda text: None,
) -> StepResult:
    """Train ``warmup + steps`` steps on a policy that was written; measure the last ``steps``.

    Raises:
        BenchError: a step was not of the work that was asked for.
        ConfigError: settings that cannot work.
    """
    total = [f"trainer.total_steps={warmup + steps}", *settings]
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        config = work.config(policy, Path(folder, "run"), total)
        async with open_trainer(config) as trainer:
            announce(f"{arm}: opened")
            meter, played = watch(trainer, partial(_tell_step, announce, arm))
            await trainer.fit()
    episodes = (item for step in played for member in step for item in of_trajectory(member))
    intervals = [*meter.intervals, *episodes]
    result = StepResult(arm=arm)
    for number, (start, end) in enumerate(_windows(meter)):
        if number >= warmup:
            result.steps.append(shares(intervals, start, end))
    for members in played[warmup:]:
        result.sampled_tokens.append(sum(member.num_sampled_tokens for member in members))
        result.context_tokens.append(sum(len(s) for member in members for s in member.segments))
    refuse_other_work(result, work)
    return result


def _tell_step(announce: Callable[[str], None], arm: str, step: int, total: int) -> None:
    announce(f"{arm}: step {step} of {total} is trained")


def watch(
    trainer: Trainer, told: Callable[[int, int], None]
) -> tuple[IntervalMeter, list[list[Trajectory]]]:
    """Have a trainer note when its phases begin and end, and write no checkpoint.

    Args:
        told: after every update, the number of its step and how many there are.

    Returns:
        the meter, and a list to which every step adds the episodes that it took.
    """
    meter, played = IntervalMeter(), list[list[Trajectory]]()
    trainer.meter = meter
    trainer.placement = _WatchedPlacement(trainer.placement, meter)
    trainer.checkpoints = _NoCheckpoints()
    learner = cast(Learner, trainer.learner)
    learner.actor = cast(Any, _WatchedEngine(learner.actor, meter))
    trainer.compute = cast(ComputeThread, _WatchedCompute(trainer.compute, meter))
    assemble, describe = trainer.assemble, trainer.describe

    def watched(groups: Sequence[TrajectoryGroup]) -> TrainBatch:
        played.append([member for group in groups for member in group.recorded])
        return assemble(groups)

    def described(groups: Sequence[TrajectoryGroup], batch: TrainBatch) -> Metrics:
        with meter.span("describe"):
            told(len(played), trainer.config.total_steps)
            return describe(groups, batch)

    trainer.assemble = watched
    trainer.describe = described
    return meter, played


class _WatchedEngine:
    """A training engine whose inference has a span of its own."""

    def __init__(self, engine: Any, meter: IntervalMeter) -> None:
        self._engine = engine
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        """Pass on everything else."""
        return getattr(self._engine, name)

    def infer_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Infer, and note the time."""
        with self._meter.span("logprob"):
            return self._engine.infer_batch(*args, **kwargs)


class _WatchedCompute:
    """A thread for work whose hand-over counts as the driver's time."""

    def __init__(self, compute: ComputeThread, meter: IntervalMeter) -> None:
        self._compute = compute
        self._meter = meter

    async def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute, and note the time."""
        with self._meter.span("compute"):
            return await self._compute.run(work, *args, **kwargs)


class _WatchedPlacement:
    """A placement whose changes of owner have spans of their own."""

    def __init__(self, placement: Placement, meter: IntervalMeter) -> None:
        self._placement = placement
        self._meter = meter

    @asynccontextmanager
    async def _training(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            with self._meter.span("sleep"):
                await stack.enter_async_context(self._placement.training())
            yield
            with self._meter.span("wake"):
                await stack.aclose()

    def training(self) -> AbstractAsyncContextManager[None]:
        """Hold the device for an update."""
        return self._training()


class _NoCheckpoints:
    """A benchmark is not resumed."""

    def save(self, step: int, parts: Any, progress: Any, *, score: float | None) -> None:
        """Write nothing."""

    def flush(self) -> None:
        """Nothing is being written."""


def _windows(meter: IntervalMeter) -> list[tuple[float, float]]:
    """Return the steps, each up to the beginning of the next; what lies between is the driver's."""
    windows = []
    for number, (start, end) in enumerate(meter.steps):
        following = meter.steps[number + 1 :][:1]
        until = following[0][0] if following else end
        meter.intervals.append(Interval("driver", end, until))
        windows.append((start, until))
    return windows


def refuse_other_work(result: StepResult, work: FixedWork) -> None:
    """Refuse figures of other work than was asked for.

    Raises:
        BenchError: a step sampled more or fewer tokens.
    """
    wanted = work.num_trajectories * work.turns * work.turn_tokens
    for number, sampled in enumerate(result.sampled_tokens):
        if abs(sampled - wanted) > EQUAL_WORK * wanted:
            raise BenchError(
                f"step {number} sampled {sampled:,} tokens, {wanted:,} were asked for: episodes "
                "failed or ended early; look at them with trainer.trajectories=all"
            )


def step_floor(work: FixedWork, shape: ModelShape, device: Device) -> dict[str, float]:
    """Return seconds that the phases take at least on one device, by what was measured of it.

    A prompt is read once for all its samples. Inference costs one pass over every token, an update
    three; a sync reads and writes the weights in bfloat16.
    """
    cost, sampled = EngineCost(shape, device), work.turn_tokens
    memory_s = compute_s = 0.0
    before = work.prompt_tokens
    for _ in range(work.turns):
        memory, compute = cost.work(sampled, before, batch=work.num_trajectories)
        memory_s += work.num_trajectories * memory
        compute_s += work.num_trajectories * compute
        before += sampled + work.answer_tokens
    prefill_s = work.prompts * cost.prefill_s(work.prompt_tokens)
    pass_s = work.num_trajectories * cost.prefill_s(before - work.answer_tokens)
    return {
        "gen": max(memory_s, compute_s + prefill_s),
        "logp": pass_s,
        "update": _NUM_TRACED_PASSES * pass_s,
        "sync": 4 * shape.matmul_params / device.bytes_per_s,
    }


HEADERS = ("phase", "median s", "min", "max", "share", "floor s", "of floor")


def rows(result: StepResult, floor: Mapping[str, float]) -> list[list[Any]]:
    """Return a line per phase that took any time, and one for the whole."""
    wall_s = statistics.median(result.wall_s)
    lines: list[list[Any]] = []
    for phase in (*PHASES, OTHER):
        median = result.median(phase)
        if median > 0 or result.extremes(phase)[1] > 0:
            least = floor.get(phase)
            of_floor = least / median if least and median else None
            share = f"{median / wall_s:.1%}"
            lines.append([phase, median, *result.extremes(phase), share, least, of_floor])
    whole = sum(least for phase, least in floor.items() if result.median(phase) > 0)
    lines.append(
        ["step", wall_s, min(result.wall_s), max(result.wall_s), "100%", whole, whole / wall_s]
    )
    return lines
