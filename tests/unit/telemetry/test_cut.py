"""What was cut is counted by length and task, and nothing else is told of it."""

from __future__ import annotations

from agentrl.telemetry.metrics import rollout_metrics
from agentrl.testing.run_data import make_trajectory
from agentrl.types import StopReason, Task, TrajectoryGroup


def group(task: str, *, cut: bool, ended: int = 0) -> TrajectoryGroup:
    members = [make_trajectory(seed=index) for index in range(3)]
    for member in members[:ended]:
        member.stop_reason, member.score = StopReason.CUT, None
    return TrajectoryGroup(
        id=task,
        task=Task(id=task, data={}),
        env_id="e",
        trajectories=members,
        policy_version=0,
        cut=cut,
        gave_up=cut,
    )


def test_cut_groups_are_counted_by_length_and_task_and_enter_no_mean() -> None:
    whole = [group("a", cut=False), group("b", cut=False)]
    slow = [group("slow", cut=True, ended=2), group("slow", cut=True, ended=1)]
    found = rollout_metrics([*whole, *slow])
    lost = [member for item in slow for member in item.trajectories]
    assert found["cut/groups"] == 2 and found["cut/task/e/slow"] == 2
    assert (found["cut/ended"], found["cut/finished"]) == (3, 3)
    assert found["cut/tokens"] == sum(member.num_sampled_tokens for member in lost) > 0
    lengths = {key: value for key, value in found.items() if key.startswith("cut/length/tokens<=")}
    assert sum(lengths.values()) == 6
    without = rollout_metrics(whole)
    about_cut = ("cut/", "censoring/")
    assert {k: v for k, v in found.items() if not k.startswith(about_cut)} == {
        k: v for k, v in without.items() if not k.startswith(about_cut)
    }
    censored = {k: v for k, v in found.items() if k.startswith("censoring/") and "/cut/" in k}
    assert sum(censored.values()) == 6
    assert not any(key.startswith("cut/") for key in without)
