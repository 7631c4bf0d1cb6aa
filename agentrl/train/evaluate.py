"""Held-out evaluation with the policy that is being sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from agentrl.errors import TrainingError
from agentrl.rollout.buffer import failure_causes
from agentrl.rollout.tasks import Dispatch
from agentrl.telemetry.evaluation import evaluation_metrics
from agentrl.types import Task, Trajectory, TrajectoryGroup

RunEvalGroup = Callable[[str, Dispatch], Coroutine[Any, Any, TrajectoryGroup]]


class Evaluator:
    """Samples held-out tasks outside of the buffer; nothing of it is ever trained on.

    Seeds depend on split, task and sample but not on the step: evaluations of one run use common
    random numbers, and with a learning rate of 0 they are equal to the last bit.

    Args:
        run_group: samples one task of a split.
        tasks: split -> name of the environment -> tasks.
        every: steps between evaluations on ``val``; 0 for none, not even at the end.
        total_steps: ``test`` is measured before the first step and after this one, as is ``val``.
        stall_timeout_s: longest time in which no task ends.
    """

    def __init__(
        self,
        run_group: RunEvalGroup,
        tasks: Mapping[str, Mapping[str, Sequence[Task]]],
        *,
        every: int,
        total_steps: int,
        stall_timeout_s: float,
    ) -> None:
        self._run_group = run_group
        self._tasks = tasks
        self._every = every
        self._total_steps = total_steps
        self._stall_timeout_s = stall_timeout_s

    def due(self, step: int) -> list[str]:
        """Return the splits to measure after ``step`` updates."""
        splits = []
        if self._every and (step % self._every == 0 or step == self._total_steps):
            splits.append("val")
        if step in (0, self._total_steps):
            splits.append("test")
        return [split for split in splits if any(map(len, self._tasks.get(split, {}).values()))]

    async def run(
        self, splits: Sequence[str], *, step: int
    ) -> tuple[dict[str, Any], list[Trajectory]]:
        """Measure ``splits``; returns metrics and the trajectories behind them.

        Raises:
            TrainingError: most episodes of an environment failed, so what is left says nothing; or
                no task has ended for ``stall_timeout_s``.
        """
        metrics: dict[str, Any] = {}
        trajectories: list[Trajectory] = []
        for split in splits:
            for env, groups in (await self._sample(split)).items():
                refuse_censored(
                    groups, what=f"the evaluation of {env!r} on {split!r} after step {step}"
                )
                metrics |= evaluation_metrics(groups, prefix=f"{split}/{env}")
                trajectories += [item for group in groups for item in group.trajectories]
        return metrics, trajectories

    async def _sample(self, split: str) -> dict[str, list[TrajectoryGroup]]:
        pending: dict[str, list[asyncio.Task[TrajectoryGroup]]] = {}
        limit_s, now = self._stall_timeout_s, asyncio.get_running_loop().time
        num_ended = 0

        def go_on(_: asyncio.Task[TrajectoryGroup]) -> None:
            nonlocal num_ended
            if not limit.expired():
                num_ended += 1
                limit.reschedule(now() + limit_s)

        try:
            async with asyncio.timeout(limit_s) as limit, asyncio.TaskGroup() as group:
                for env, tasks in self._tasks[split].items():
                    for dispatch in dispatches(env, tasks):
                        task = group.create_task(self._run_group(split, dispatch))
                        task.add_done_callback(go_on)
                        pending.setdefault(env, []).append(task)
        except TimeoutError:
            num_tasks = sum(map(len, pending.values()))
            what = f"the evaluation on {split!r}"
            raise TrainingError(stands_still(what, num_ended, num_tasks, limit_s)) from None
        return {env: [task.result() for task in tasks] for env, tasks in pending.items()}


def dispatches(env: str, tasks: Sequence[Task]) -> list[Dispatch]:
    """Return the prompts of a whole list of tasks, in its order."""
    return [Dispatch(index=index, epoch=0, task=task, env=env) for index, task in enumerate(tasks)]


def stands_still(what: str, num_ended: int, num_tasks: int, limit_s: float) -> str:
    """Say that no task has ended for too long."""
    return (
        f"{what} stands still: of {num_tasks} tasks {num_ended} have ended, and none in the last "
        f"rollout.collect_timeout_s={limit_s:g} s; an engine or an environment hangs, or raise it"
    )


def refuse_censored(groups: Sequence[TrajectoryGroup], *, what: str) -> None:
    """Refuse to call a few survivors a result.

    Raises:
        TrainingError: more than half of the trajectories failed; says with what.
    """
    members = [trajectory for group in groups for trajectory in group.trajectories]
    num_failed = sum(trajectory.failed for trajectory in members)
    if num_failed > len(members) / 2:
        raise TrainingError(
            f"{what} means nothing: {num_failed} of {len(members)} episodes failed; "
            f"{failure_causes(groups)}"
        )


def choose_tasks(tasks: Sequence[Task], limit: int) -> Sequence[Task]:
    """Return the first ``limit`` tasks (0: all): environments order a split to be stratified."""
    return tasks[:limit] if limit else tasks


def held_out_success(metrics: Mapping[str, Any]) -> float | None:
    """Mean success over environments on the validation split; None where it was not measured."""
    found = [
        float(value)
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith("/success")
    ]
    return sum(found) / len(found) if found else None
