"""Samples a prompt ``n`` times and applies the failure policy to what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.errors import TrainingError
from agentrl.rollout.config import FailureConfig, FailurePolicy
from agentrl.rollout.tasks import Dispatch
from agentrl.seeding import derive_seed
from agentrl.types import Task, Trajectory, TrajectoryGroup


@dataclass(slots=True, frozen=True, kw_only=True)
class Sample:
    """One episode to play; its seed is a function of everything that names it."""

    task: Task
    group_id: str
    sample_index: int
    attempt: int
    seed: int
    temperature: float


RunSample = Callable[[Sample], Awaitable[Trajectory]]


class GroupRunner:
    """Plays the episodes of a prompt concurrently.

    Args:
        run_sample: plays one episode; returns failures as data.
        env_id: name of the environment, for the record.
        num_samples: G.
        temperature: of the sampling.
        failure: the policy for members that failed.
        seed: of the run.
        purpose: separates the seeds of training and of evaluations.
        concurrency: shared bound on episodes in flight.
        policy_version: tells the version that is being sampled.
        namespace: part of seeds and ids of groups, where several environments share a run.
    """

    def __init__(
        self,
        run_sample: RunSample,
        *,
        env_id: str,
        num_samples: int,
        temperature: float,
        failure: FailureConfig,
        seed: int,
        purpose: str,
        concurrency: asyncio.Semaphore,
        policy_version: Callable[[], int],
        namespace: str = "",
    ) -> None:
        self._run_sample = run_sample
        self._env_id = env_id
        self._num_samples = num_samples
        self._temperature = temperature
        self._failure = failure
        self._seed = seed
        self._scope = (purpose, namespace) if namespace else (purpose,)
        self._concurrency = concurrency
        self._policy_version = policy_version

    async def run(self, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt.

        Raises:
            TrainingError: a member failed under the policy ``fail_fast``.
        """
        group = TrajectoryGroup(
            id="-".join((*self._scope, str(dispatch.index))),
            task=dispatch.task,
            env_id=self._env_id,
            trajectories=[],
            policy_version=self._policy_version(),
            index=dispatch.index,
        )
        async with asyncio.TaskGroup() as members:
            tasks = [
                members.create_task(self._run_member(dispatch, group, sample_index))
                for sample_index in range(self._num_samples)
            ]
        group.trajectories = [task.result() for task in tasks]
        return group

    async def _run_member(
        self, dispatch: Dispatch, group: TrajectoryGroup, sample_index: int
    ) -> Trajectory:
        retries = self._failure.k if self._failure.policy is FailurePolicy.retry_fresh else 0
        for attempt in range(retries + 1):
            parts = (*self._scope, dispatch.epoch, dispatch.task.id, sample_index, attempt)
            sample = Sample(
                task=dispatch.task,
                group_id=group.id,
                sample_index=sample_index,
                attempt=attempt,
                seed=derive_seed(self._seed, *parts),
                temperature=self._temperature,
            )
            async with self._concurrency:
                trajectory = await self._run_sample(sample)
            if not trajectory.failed:
                return trajectory
            if self._failure.policy is FailurePolicy.fail_fast:
                raise TrainingError(
                    f"trajectory {trajectory.id} failed with {trajectory.stop_reason}: "
                    f"{trajectory.error} (failure.policy=fail_fast)"
                )
            if attempt < retries:
                group.discarded.append(trajectory)
        return trajectory  # pyright: ignore[reportPossiblyUnboundVariable]


def is_trainable(group: TrajectoryGroup, failure: FailureConfig) -> bool:
    """Whether enough members survived to train on under the policy."""
    num_valid = sum(not trajectory.failed for trajectory in group.trajectories)
    match failure.policy:
        case FailurePolicy.min_group:
            return num_valid >= failure.k
        case FailurePolicy.drop_group:
            return num_valid == len(group.trajectories)
        case _:
            return num_valid >= min(2, len(group.trajectories))
