from __future__ import annotations

import asyncio

import pytest

from agentrl.agent.request import EpisodeRequest
from agentrl.errors import TrainingError
from agentrl.rollout.buffer import failure_causes
from agentrl.rollout.config import FailureConfig, FailurePolicy
from agentrl.rollout.groups import GroupPlan, GroupRunner, Sample, is_trainable
from agentrl.rollout.tasks import Dispatch
from agentrl.seeding import derive_seed
from agentrl.types import GREEDY_INDEX, Score, StopReason, Task, Trajectory, TrajectoryGroup


def trajectory(sample: Sample, *, failed: bool) -> Trajectory:
    return Trajectory(
        id=f"{sample.group_id}-{sample.sample_index}-{sample.attempt}",
        env_id="e",
        task=sample.task,
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        attempt=sample.attempt,
        seed=sample.seed,
        segments=[],
        turns=[],
        messages=[],
        stop_reason=StopReason.SANDBOX_ERROR if failed else StopReason.TERMINATED,
        error="SandboxError: gone" if failed else None,
        score=None if failed else Score(reward=1.0, success=True),
    )


def play(
    failures: set[tuple[int, int]],
    failure: FailureConfig,
    *,
    seed: int = 0,
    n: int = 4,
    greedy_baseline: bool = False,
) -> tuple[TrajectoryGroup, list[Sample]]:
    """Run one group; ``failures`` are (sample, attempt) that fail."""
    played: list[Sample] = []

    async def run_sample(sample: Sample) -> Trajectory:
        played.append(sample)
        await asyncio.sleep(0)
        return trajectory(sample, failed=(sample.sample_index, sample.attempt) in failures)

    async def scenario() -> TrajectoryGroup:
        runner = GroupRunner(
            run_sample,
            GroupPlan(
                purpose="train", num_samples=n, temperature=1.0, greedy_baseline=greedy_baseline
            ),
            env_id="e",
            failure=failure,
            seed=seed,
            concurrency=asyncio.Semaphore(2),
            policy_version=lambda: 3,
        )
        return await runner.run(Dispatch(index=5, epoch=1, task=Task(id="a", data={})))

    return asyncio.run(scenario()), played


RETRY = FailureConfig(policy=FailurePolicy.retry_fresh, k=2)


def test_members_come_back_in_order_with_distinct_seeds() -> None:
    group, played = play(set(), RETRY)
    assert [t.sample_index for t in group.trajectories] == [0, 1, 2, 3]
    assert len({sample.seed for sample in played}) == 4
    assert group.policy_version == 3


def test_seeds_depend_on_what_is_sampled_and_on_the_run_seed() -> None:
    first = [sample.seed for sample in play(set(), RETRY)[1]]
    again = [sample.seed for sample in play(set(), RETRY)[1]]
    other = [sample.seed for sample in play(set(), RETRY, seed=1)[1]]
    assert first == again
    assert not set(first) & set(other)


def test_a_failed_member_is_run_again_with_another_seed_and_kept_as_data() -> None:
    group, played = play({(1, 0), (1, 1)}, RETRY)
    assert [t.attempt for t in group.trajectories] == [0, 2, 0, 0]
    assert [t.attempt for t in group.discarded] == [0, 1]
    seeds = [sample.seed for sample in played if sample.sample_index == 1]
    assert len(set(seeds)) == 3


def test_discarded_attempts_stand_in_the_same_order_whichever_failed_first() -> None:
    async def scenario(slow: int) -> list[tuple[int, int]]:
        failed_first = asyncio.Event()

        async def run_sample(sample: Sample) -> Trajectory:
            if sample.attempt == 0 and sample.sample_index == slow:
                await failed_first.wait()
            elif sample.attempt == 1:  # its first attempt is among the discarded
                failed_first.set()
            return trajectory(sample, failed=sample.attempt == 0)

        runner = GroupRunner(
            run_sample,
            GroupPlan(purpose="train", num_samples=2, temperature=1.0),
            env_id="e",
            failure=RETRY,
            seed=0,
            concurrency=asyncio.Semaphore(2),
            policy_version=lambda: 0,
        )
        group = await runner.run(Dispatch(index=0, epoch=0, task=Task(id="a", data={})))
        return [(item.sample_index, item.attempt) for item in group.discarded]

    for slow in (0, 1):
        assert asyncio.run(scenario(slow)) == [(0, 0), (1, 0)]


def test_retries_end_and_the_failure_stays_in_the_group() -> None:
    group, _ = play({(1, attempt) for attempt in range(9)}, RETRY)
    assert [t.failed for t in group.trajectories] == [False, True, False, False]
    assert len(group.discarded) == 2
    assert is_trainable(group, RETRY)


def test_fail_fast_ends_the_run_with_the_cause() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        play({(0, 0)}, FailureConfig(policy=FailurePolicy.fail_fast))
    assert caught.group_contains(TrainingError, match=r"sandbox_error: SandboxError: gone")


@pytest.mark.parametrize(
    ("policy", "k", "num_failed", "trainable"),
    [
        (FailurePolicy.mask, 0, 2, True),
        (FailurePolicy.mask, 0, 3, False),
        (FailurePolicy.min_group, 3, 1, True),
        (FailurePolicy.min_group, 3, 2, False),
        (FailurePolicy.drop_group, 0, 0, True),
        (FailurePolicy.drop_group, 0, 1, False),
    ],
)
def test_each_policy_decides_which_groups_train(
    policy: FailurePolicy, k: int, num_failed: int, trainable: bool
) -> None:
    failure = FailureConfig(policy=policy, k=k)
    group, played = play({(index, 0) for index in range(num_failed)}, failure)
    assert len(played) == 4, "only retry_fresh plays again"
    assert is_trainable(group, failure) is trainable


def test_environments_that_share_ids_of_tasks_share_neither_seeds_nor_groups() -> None:
    def run(namespace: str) -> tuple[TrajectoryGroup, list[int]]:
        seeds: list[int] = []

        async def run_sample(sample: Sample) -> Trajectory:
            seeds.append(sample.seed)
            return trajectory(sample, failed=False)

        async def scenario() -> TrajectoryGroup:
            runner = GroupRunner(
                run_sample,
                GroupPlan(purpose="train", num_samples=2, temperature=1.0),
                env_id=namespace or "e",
                failure=RETRY,
                seed=0,
                concurrency=asyncio.Semaphore(2),
                policy_version=lambda: 0,
                namespace=namespace,
            )
            return await runner.run(Dispatch(index=5, epoch=1, task=Task(id="a", data={})))

        return asyncio.run(scenario()), seeds

    groups, seeds = zip(*(run(name) for name in ("one", "two", "")), strict=True)
    assert [group.id for group in groups] == ["train-one-5", "train-two-5", "train-5"]
    assert len({seed for some in seeds for seed in some}) == 6
    assert seeds[2] == [sample.seed for sample in play(set(), RETRY, n=2)[1]]
    # Of a run with one environment, as they have always been.
    assert seeds[2][0] == derive_seed(0, "train", 1, "a", 0, 0)


def play_greedy(
    failures: set[tuple[int, int]], failure: FailureConfig
) -> tuple[TrajectoryGroup, list[Sample]]:
    return play(failures, failure, greedy_baseline=True)


def test_the_greedy_baseline_is_played_beside_the_members() -> None:
    group, played = play_greedy(set(), RETRY)
    assert group.baseline is not None and group.baseline.sample_index == GREEDY_INDEX
    assert group.baseline not in group.trajectories and len(group.trajectories) == 4
    temperatures = {sample.sample_index: sample.temperature for sample in played}
    assert temperatures == {GREEDY_INDEX: 0.0, 0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
    assert len({sample.seed for sample in played}) == 5
    assert group.recorded == [*group.trajectories, group.baseline]
    plain, _ = play(set(), RETRY)
    assert plain.baseline is None and plain.recorded == plain.trajectories
    assert [t.seed for t in plain.trajectories] == [t.seed for t in group.trajectories]


def test_a_failed_baseline_is_run_again_and_without_one_nothing_trains() -> None:
    group, _ = play_greedy({(GREEDY_INDEX, 0)}, RETRY)
    assert group.baseline is not None and group.baseline.attempt == 1
    assert [t.sample_index for t in group.discarded] == [GREEDY_INDEX]
    assert is_trainable(group, RETRY)
    for policy in (FailurePolicy.retry_fresh, FailurePolicy.mask, FailurePolicy.min_group):
        failure = FailureConfig(policy=policy, k=2)
        group, _ = play_greedy({(GREEDY_INDEX, attempt) for attempt in range(9)}, failure)
        assert group.baseline is not None and group.baseline.failed
        assert not any(t.failed for t in group.trajectories)
        assert not is_trainable(group, failure)
        assert "1 trajectories failed: 1 sandbox_error" in failure_causes([group])


def test_the_session_of_the_greedy_episode_has_a_name() -> None:
    request = EpisodeRequest(
        env_id="e", task=Task(id="a", data={}), seed=0, group_id="g", sample_index=GREEDY_INDEX
    )
    assert request.trajectory_id == "g/greedy.0"


def test_a_cut_group_returns_what_its_members_have_without_trying_again() -> None:
    played: list[Sample] = []

    async def run_sample(sample: Sample) -> Trajectory:
        played.append(sample)
        if sample.sample_index:  # ends when it is cut, as an episode does
            while not sample.cut.is_set:
                await asyncio.sleep(0)
        made = trajectory(sample, failed=bool(sample.sample_index))
        made.stop_reason = StopReason.CUT if sample.sample_index else made.stop_reason
        return made

    async def scenario() -> TrajectoryGroup:
        runner = GroupRunner(
            run_sample,
            GroupPlan(purpose="train", num_samples=4, temperature=1.0),
            env_id="e",
            failure=FailureConfig(policy=FailurePolicy.fail_fast),
            seed=0,
            concurrency=asyncio.Semaphore(2),  # two wait for a place when the cut comes
            policy_version=lambda: 3,
        )
        dispatch = Dispatch(index=5, epoch=1, task=Task(id="a", data={}))
        group = asyncio.create_task(runner.run(dispatch))
        await asyncio.sleep(0.01)
        await runner.cut(Dispatch(index=6, epoch=1, task=Task(id="b", data={})))
        assert not group.done()
        await runner.cut(dispatch)
        async with asyncio.timeout(20):
            return await group

    group = asyncio.run(scenario())
    reasons = [member.stop_reason for member in group.trajectories]
    assert reasons == [StopReason.TERMINATED, StopReason.CUT, StopReason.CUT, StopReason.CUT]
    assert len(played) == 4 and not group.discarded
