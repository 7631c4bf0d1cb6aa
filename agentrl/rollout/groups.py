"""Samples a prompt ``n`` times and applies the failure policy to what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentrl.agent.branch import BranchPoint
from agentrl.agent.cut import Cut
from agentrl.errors import TrainingError
from agentrl.rollout.config import FailureConfig, FailurePolicy, TreeConfig
from agentrl.rollout.tasks import Dispatch
from agentrl.rollout.tree import choose_node, deal_members
from agentrl.seeding import derive_seed
from agentrl.types import GREEDY_INDEX, Task, Trajectory, TrajectoryGroup


@dataclass(slots=True, frozen=True, kw_only=True)
class Sample:
    """One episode to play; its seed is a function of everything that names it."""

    task: Task
    group_id: str
    sample_index: int
    attempt: int
    seed: int
    temperature: float
    branch: BranchPoint | None = None
    """Where to go on from; None: from the start."""
    branch_points: list[BranchPoint] | None = None
    """Filled with the states that others may go on from; None: nobody will."""
    cut: Cut = field(default_factory=Cut)
    """Ends the episode early; shared by the samples of a prompt."""


RunSample = Callable[[Sample], Awaitable[Trajectory]]


@dataclass(slots=True, frozen=True, kw_only=True)
class GroupPlan:
    """How prompts are sampled for one purpose."""

    purpose: str
    """Separates the seeds of training and of evaluations."""
    num_samples: int
    """G."""
    temperature: float
    """Of the sampling."""
    greedy_baseline: bool = False
    """Play the prompt once more, at temperature 0 (``TrajectoryGroup.baseline``)."""
    tree: TreeConfig | None = None
    """Whether members branch off from each other."""


class GroupRunner:
    """Plays the episodes of a prompt concurrently.

    Args:
        run_sample: plays one episode; returns failures as data.
        plan: how many episodes, and how they are sampled. A branch of a tree fails alone. Where
            every episode that it could branch from has failed, it is played from the start.
        env_id: name of the environment, for the record.
        failure: the policy for members that failed.
        seed: of the run.
        concurrency: shared bound on episodes in flight.
        policy_version: tells the version that is being sampled.
        namespace: part of seeds and ids of groups, where several environments share a run.

    Raises:
        ConfigError: a group of this size cannot be sampled as ``tree`` says.
    """

    def __init__(
        self,
        run_sample: RunSample,
        plan: GroupPlan,
        *,
        env_id: str,
        failure: FailureConfig,
        seed: int,
        concurrency: asyncio.Semaphore,
        policy_version: Callable[[], int],
        namespace: str = "",
    ) -> None:
        self._run_sample = run_sample
        self._env_id = env_id
        self._trees = deal_members(plan.num_samples, plan.tree or TreeConfig())
        self._greedy_baseline = plan.greedy_baseline
        self._temperature = plan.temperature
        self._failure = failure
        self._seed = seed
        self._scope = (plan.purpose, namespace) if namespace else (plan.purpose,)
        self._concurrency = concurrency
        self._policy_version = policy_version
        self._cuts: dict[int, Cut] = {}
        """By the index of the prompts that are being sampled."""

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
        self._cuts[dispatch.index] = Cut()
        try:
            await self._play(dispatch, group)
        finally:
            del self._cuts[dispatch.index]
        return group

    async def cut(self, dispatch: Dispatch) -> None:
        """End the episodes of a prompt with what they have; nothing if none is being played."""
        if dispatch.index in self._cuts:
            self._cuts[dispatch.index].set()

    async def _play(self, dispatch: Dispatch, group: TrajectoryGroup) -> None:
        """Fill the group with its members, and its baseline, if any."""
        async with asyncio.TaskGroup() as playing:
            trees = [
                playing.create_task(self._grow(dispatch, group, rounds)) for rounds in self._trees
            ]
            greedy = (
                playing.create_task(self._run_member(dispatch, group, GREEDY_INDEX))
                if self._greedy_baseline
                else None
            )
        members = [member for tree in trees for member in tree.result()]
        group.trajectories = sorted(members, key=lambda member: member.sample_index)
        # They came in the order in which they failed, which no two runs share.
        group.discarded.sort(key=lambda attempt: (attempt.sample_index, attempt.attempt))
        if greedy is not None:
            group.baseline, _ = greedy.result()

    async def _grow(
        self, dispatch: Dispatch, group: TrajectoryGroup, rounds: Sequence[Sequence[int]]
    ) -> list[Trajectory]:
        """Play a tree: each round branches from the episodes of the rounds before it."""
        members: list[Trajectory] = []
        nodes: list[BranchPoint] = []
        for number, indices in enumerate(rounds, start=1):
            async with asyncio.TaskGroup() as playing:
                tasks = [
                    playing.create_task(
                        self._run_member(
                            dispatch, group, index, nodes, keep_nodes=number < len(rounds)
                        )
                    )
                    for index in indices
                ]
            # Where a clock cut what is branched from, it decided which states there are to draw.
            limited = any(member.wall_clock_limited for member in members)
            found = list[BranchPoint]()
            for trajectory, points in (task.result() for task in tasks):
                trajectory.wall_clock_limited |= limited
                members.append(trajectory)
                found += [] if trajectory.failed else points
            nodes += found
        return members

    async def _run_member(
        self,
        dispatch: Dispatch,
        group: TrajectoryGroup,
        sample_index: int,
        nodes: Sequence[BranchPoint] = (),
        *,
        keep_nodes: bool = False,
    ) -> tuple[Trajectory, list[BranchPoint]]:
        """Play a member until an attempt stands; return it with the states to branch from."""
        retries = self._failure.k if self._failure.policy is FailurePolicy.retry_fresh else 0
        for attempt in range(retries + 1):
            parts = (*self._scope, dispatch.epoch, dispatch.task.id, sample_index, attempt)
            seed = derive_seed(self._seed, *parts)
            points: list[BranchPoint] = []
            sample = Sample(
                task=dispatch.task,
                group_id=group.id,
                sample_index=sample_index,
                attempt=attempt,
                seed=seed,
                temperature=0.0 if sample_index == GREEDY_INDEX else self._temperature,
                branch=choose_node(nodes, seed),
                branch_points=points if keep_nodes else None,
                cut=self._cuts[dispatch.index],
            )
            async with self._concurrency:
                trajectory = await self._run_sample(sample)
            if not trajectory.failed or sample.cut.is_set:
                break
            if self._failure.policy is FailurePolicy.fail_fast:
                raise TrainingError(
                    f"trajectory {trajectory.id} failed with {trajectory.stop_reason}: "
                    f"{trajectory.error} (failure.policy=fail_fast)"
                )
            if attempt < retries:
                group.discarded.append(trajectory)
        return trajectory, points  # pyright: ignore[reportPossiblyUnboundVariable]


def is_trainable(group: TrajectoryGroup, failure: FailureConfig) -> bool:
    """Whether enough members survived to train on under the policy, and the baseline, if any."""
    if group.baseline is not None and group.baseline.failed:
        return False
    num_valid = sum(not trajectory.failed for trajectory in group.trajectories)
    match failure.policy:
        case FailurePolicy.min_group:
            return num_valid >= failure.k
        case FailurePolicy.drop_group:
            return num_valid == len(group.trajectories)
        case _:
            return num_valid >= min(2, len(group.trajectories))
