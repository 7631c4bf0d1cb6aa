from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentrl.telemetry.metrics import (
    group_metrics,
    rollout_metrics,
    staleness_metrics,
    throughput_metrics,
    trajectory_metrics,
)
from agentrl.testing.run_data import make_task, make_trajectory
from agentrl.types import (
    Score,
    StopReason,
    ToolCall,
    ToolResult,
    ToolStatus,
    Trajectory,
    TrajectoryGroup,
)


def _scored(reward: float, *, seed: int = 0, success: bool = False) -> Trajectory:
    item = make_trajectory(seed=seed, num_turns=1, success=success)
    return replace(item, score=Score(reward=reward, success=success, parts={"tests": reward}))


def test_failed_trajectories_leave_the_means_but_not_the_counts() -> None:
    failed = make_trajectory(seed=1, stop_reason=StopReason.SANDBOX_ERROR, num_turns=4)
    metrics = trajectory_metrics([_scored(1.0, success=True), _scored(0.0, seed=2), failed])
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward_parts/tests"] == 0.5
    assert metrics["success/mean"] == 0.5
    assert metrics["turns/mean"] == 1.0
    assert metrics["trajectories/count"] == 3
    assert metrics["trajectories/failed"] == 1
    assert metrics["stop_reason/sandbox_error"] == pytest.approx(1 / 3)
    assert metrics["stop_reason/terminated"] == pytest.approx(2 / 3)


def test_turn_rewards_count_and_tokens_are_the_sampled_ones() -> None:
    item = _scored(1.0)
    item.turns[0].reward = 0.25
    metrics = trajectory_metrics([item])
    assert metrics["reward/mean"] == 1.25
    assert metrics["response_tokens/mean"] == item.segments[0].loss_mask.sum()


def test_a_mean_of_nothing_has_no_key() -> None:
    for items in ([], [make_trajectory(seed=0, stop_reason=StopReason.ENV_ERROR)]):
        metrics = trajectory_metrics(items)
        assert "reward/mean" not in metrics and "success/mean" not in metrics
        assert metrics["trajectories/count"] == len(items)
        assert all(np.isfinite(value) for value in metrics.values())


def test_signs_of_tampering_are_shares_of_the_scored_trajectories() -> None:
    items = [_scored(1.0, seed=seed) for seed in range(4)]
    assert not [name for name in trajectory_metrics(items) if name.startswith("tampering/")]
    for item, found in zip(items, [("traces",), ("traces", "exits_early"), (), ()], strict=True):
        assert item.score is not None
        item.score = replace(item.score, tampering=found)
    failed = make_trajectory(seed=9, stop_reason=StopReason.SANDBOX_ERROR, num_turns=1)
    metrics = trajectory_metrics([*items, failed])
    assert {name: value for name, value in metrics.items() if name.startswith("tampering/")} == {
        "tampering/any": 0.5,
        "tampering/traces": 0.5,
        "tampering/exits_early": 0.25,
    }


def test_tool_calls_are_counted_by_status() -> None:
    items = [
        make_trajectory(seed=0, num_turns=3, tool_status=ToolStatus.OK),
        make_trajectory(seed=1, num_turns=2, tool_status=ToolStatus.TIMEOUT),
        make_trajectory(seed=2, num_turns=2, tool_status=ToolStatus.ERROR),
        make_trajectory(
            seed=3,
            num_turns=2,
            tool_status=ToolStatus.INFRA_ERROR,
            stop_reason=StopReason.TOOL_INFRA_ERROR,
        ),
    ]
    metrics = trajectory_metrics(items)
    assert metrics["tool/python/calls"] == 5
    assert metrics["tool/python/errors"] == 1
    assert metrics["tool/python/timeouts"] == 1
    assert metrics["tool/python/infra_errors"] == 1


def test_calls_that_repeat_an_earlier_one_of_their_trajectory_are_counted() -> None:
    def trajectory(*codes: str) -> Trajectory:
        item = make_trajectory(seed=0, num_turns=1, tool_status=ToolStatus.OK)
        (turn,) = item.turns
        turn.tool_calls = [ToolCall(name="python", arguments={"code": code}) for code in codes]
        turn.tool_results = [
            ToolResult(name="python", content="ok", status=ToolStatus.OK) for _ in codes
        ]
        return item

    metrics = trajectory_metrics([trajectory("a", "b", "a", "a"), trajectory("a", "c")])
    assert metrics["tool/python/calls"] == 6
    assert metrics["tool/python/repeated"] == 2


def test_what_tools_cost_beside_their_answers_is_counted() -> None:
    item = make_trajectory(seed=0, num_turns=4, tool_status=ToolStatus.OK)
    results = [result for turn in item.turns for result in turn.tool_results]
    for index, result in enumerate(results):
        result.duration_s, result.retries, result.truncated_tokens = 0.1, index, 7 * (index == 1)
    results[-1].breaker_open, results[-1].duration_s = True, 0.4
    metrics = trajectory_metrics([item])
    assert len(results) == 3
    assert metrics["tool/python/retries"] == 0 + 1 + 2
    assert metrics["tool/python/truncated"] == 1
    assert metrics["tool/python/breaker_open"] == 1
    assert metrics["timing_s/tool/python"] == pytest.approx(0.2)
    assert 0.2 < metrics["timing_s/tool_p99/python"] <= 0.4


def test_invented_tool_names_share_one_key() -> None:
    items = [make_trajectory(seed=0, num_turns=2) for _ in range(3)]
    items[0].turns[0].tool_results[0].name = "rm -rf / \n"
    items[1].turns[0].tool_results[0].name = "pythn"
    metrics = trajectory_metrics(items, tools=["python"])
    assert metrics["tool/unknown/calls"] == 2
    assert metrics["tool/python/calls"] == 1
    assert trajectory_metrics(items)["tool/pythn/calls"] == 1


def test_drift_and_wall_clock_limits_are_counted() -> None:
    timed_out = make_trajectory(seed=0, stop_reason=StopReason.TRAJECTORY_TIMEOUT)
    metrics = trajectory_metrics([replace(timed_out, drift=2), replace(timed_out, drift=1)])
    assert metrics["render/drift"] == 3
    assert metrics["wall_clock_limited"] == 2


def _group(rewards: list[float | None], discarded: int = 0) -> TrajectoryGroup:
    failed = make_trajectory(seed=0, stop_reason=StopReason.ENV_ERROR, num_turns=1)
    members = [
        replace(failed if r is None else _scored(r), id=f"{rewards}/{i}")
        for i, r in enumerate(rewards)
    ]
    return TrajectoryGroup(
        id="g",
        task=make_task(0),
        env_id="e",
        trajectories=members,
        policy_version=0,
        discarded=[failed] * discarded,
    )


def test_zero_advantage_ignores_failed_members_and_groups() -> None:
    groups = [_group([1.0, 1.0, None]), _group([1.0, 0.0]), _group([None, None])]
    trained = {member.id for member in groups[1].trajectories}
    assert group_metrics(groups, trained_ids=trained, refilled=1) == {
        "group/zero_advantage_fraction": 0.5,
        "group/dropped": 2,
        "group/refilled": 1,
    }
    assert group_metrics(groups)["group/dropped"] == 1
    assert "group/zero_advantage_fraction" not in group_metrics([])


def test_greedy_baselines_are_told_apart_from_the_members() -> None:
    failed = make_trajectory(seed=9, stop_reason=StopReason.ENV_ERROR)
    groups = [_group([0.0, 1.0]) for _ in range(3)]
    plain = rollout_metrics(groups)
    assert "reward/greedy_mean" not in plain and "group/greedy_failed" not in plain
    groups[0].baseline, groups[1].baseline = _scored(1.0, seed=7), failed
    groups[2].baseline = _scored(0.5, seed=8)
    metrics = rollout_metrics(groups)
    assert metrics["reward/greedy_mean"] == 0.75
    assert metrics["group/greedy_failed"] == 1
    assert {key: metrics[key] for key in plain} == plain


def test_every_attempt_of_a_step_has_a_fate() -> None:
    groups = [_group([1.0, 1.0, None]), _group([1.0, 0.0], discarded=2)]
    trained = {member.id for member in groups[1].trajectories}
    metrics = rollout_metrics(groups, trained_ids=trained)
    prefix = "censoring/code_sandbox/tokens<=64"
    assert {key: value for key, value in metrics.items() if key.startswith("censoring/")} == {
        f"{prefix}/dropped/zero_variance": 2,
        f"{prefix}/masked/env_error": 1,
        f"{prefix}/retried/env_error": 2,
        f"{prefix}/trained/terminated": 2,
    }
    assert metrics["trajectories/count"] == 7
    assert metrics["trajectories/failed"] == 3
    assert metrics["stop_reason/env_error"] == 3 / 7
    assert metrics["reward/mean"] == 0.75


def test_throughput_needs_tokens_and_time() -> None:
    metrics = {"response_tokens/sum": 600, "timing_s/collect": 2.0, "timing_s/update": 4.0}
    assert throughput_metrics(metrics, trained_tokens=1000) == {
        "throughput/rollout_tokens_per_s": 300.0,
        "throughput/train_tokens_per_s": 250.0,
    }
    assert throughput_metrics({"response_tokens/sum": 600, "timing_s/collect": 0.0}) == {}
    ahead = {"staleness/max": 1.0, "timing_s/collect": 1e-4, "timing_s/step": 3.0}
    assert throughput_metrics(ahead | {"response_tokens/sum": 600}) == {
        "throughput/rollout_tokens_per_s": 200.0
    }


def test_a_trajectory_is_as_old_as_its_oldest_token() -> None:
    mixed = make_trajectory(seed=0, policy_version=5)
    sampled = np.flatnonzero(mixed.segments[0].loss_mask)
    mixed.segments[0].policy_version[sampled[0]] = 2
    new = make_trajectory(seed=1, policy_version=5)
    metrics = staleness_metrics([mixed, new], current_version=5)
    assert metrics["staleness/mean"] == 1.5
    assert metrics["staleness/max"] == 3
    total = mixed.num_sampled_tokens + new.num_sampled_tokens
    assert metrics["staleness/token_mean"] == pytest.approx(3 / total)
    assert staleness_metrics([], 0) == {}


def test_branches_are_told_where_there_are_any() -> None:
    trunk, branch = make_trajectory(seed=0), make_trajectory(seed=1)
    group = TrajectoryGroup(
        id="g", task=trunk.task, env_id="e", trajectories=[trunk, branch], policy_version=0
    )
    assert "group/branched_fraction" not in group_metrics([group])
    branch.parent, branch.branch_turn = 0, 1
    assert group_metrics([group])["group/branched_fraction"] == 0.5
