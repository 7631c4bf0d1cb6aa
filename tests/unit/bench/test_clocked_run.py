"""What schedules are worth in virtual time: the real loop, a fake model, tool and optimizer."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.bench.clocked_run import ClockedResult, ClockedRun, train_on_clock
from agentrl.bench.count_lines import count_lines
from agentrl.bench.schedule_arms import Schedule
from agentrl.rollout.buffer import Lookahead
from agentrl.testing.tables import lognormal
from agentrl.testing.token_clock import ClockSettings
from agentrl.testing.virtual_time import run_virtual


def played(run: ClockedRun, directory: Path) -> ClockedResult:
    directory.mkdir()
    return run_virtual(train_on_clock(run, directory))


def ahead(run: ClockedRun, max_staleness: int) -> ClockedRun:
    rules = Lookahead(
        prompts_per_step=run.prompts_per_step,
        max_staleness=max_staleness,
        total_steps=run.num_steps,
    )
    return replace(run, lookahead=rules)


LONG_TAILED_TOOL = ClockedRun(
    prompts_per_step=16,
    num_samples=8,
    num_steps=8,
    env={"num_turns": 2, "latency_median_s": 0.05, "latency_p99_s": 3.0, "latency_limit_s": 10.0},
    engine=ClockSettings(lengths=lognormal(median=20, p99=200)),
)
"""With the agent loop."""


@pytest.mark.timeout(240)
def test_one_step_ahead_makes_nearly_twice_the_steps_with_a_long_tailed_tool(
    tmp_path: Path,
) -> None:
    found = {
        bound: played(ahead(LONG_TAILED_TOOL, bound), tmp_path / f"{bound}") for bound in (0, 1)
    }
    assert found[0].work.sampled_tokens == found[1].work.sampled_tokens
    assert found[0].staleness == 0 and found[1].staleness == 1
    assert found[0].step_s / found[1].step_s >= 1.8


SHORT = ClockedRun(
    prompts_per_step=64, num_samples=8, num_steps=1, update_s=0.0, short_episodes=True
)
WORK_BOUND = replace(
    SHORT,
    env={"num_turns": 2},
    engine=ClockSettings(
        lengths=lognormal(median=2000, p99=20_000), tokens_per_id=500, num_slots=16, sync_s=0.0
    ),
)
TAIL_BOUND = replace(
    SHORT,
    num_replicas=8,
    env={"num_turns": 2},
    engine=ClockSettings(tokens_per_id=50, num_slots=32, sync_s=0.0),
)


@pytest.mark.parametrize("run", [WORK_BOUND, TAIL_BOUND], ids=["work", "tail"])
def test_episodes_by_themselves_come_near_the_optimum(run: ClockedRun, tmp_path: Path) -> None:
    found = {
        schedule: played(replace(run, schedule=schedule), tmp_path / schedule)
        for schedule in Schedule
    }
    tokens = {result.work.sampled_tokens for result in found.values()}
    assert len(tokens) == 1 and min(result.over_optimum for result in found.values()) >= 1.0
    assert found[Schedule.ASYNC].over_optimum <= 1.15
    assert found[Schedule.ASYNC].seconds < found[Schedule.BARRIER].seconds
    assert found[Schedule.BARRIER].seconds < found[Schedule.BATCH].seconds


def test_the_bound_on_staleness_holds_while_groups_overtake_and_updates_interrupt(
    tmp_path: Path,
) -> None:
    run = replace(SHORT, prompts_per_step=8, num_steps=12, update_s=0.2, num_replicas=2)
    rules = Lookahead(prompts_per_step=8, max_staleness=3, window=12, total_steps=12)
    result = played(replace(run, lookahead=rules), tmp_path / "run")
    assert result.staleness == 3
    assert result.work.num_trajectories == 12 * 8 * 8
    in_order = played(ahead(run, 3), tmp_path / "in order")
    assert result.seconds < in_order.seconds
    assert result.work.sampled_tokens == in_order.work.sampled_tokens


def test_the_same_run_takes_the_same_time_to_the_last_bit(tmp_path: Path) -> None:
    run = ahead(replace(LONG_TAILED_TOOL, prompts_per_step=4, num_steps=4), 1)
    assert played(run, tmp_path / "a").seconds == played(run, tmp_path / "b").seconds


@pytest.mark.timeout(240)
@pytest.mark.parametrize("window", [0, 8])
def test_the_driver_works_as_much_for_a_trajectory_however_many_there_are(
    window: int, tmp_path: Path
) -> None:
    def lines(num_groups: int) -> int:
        """Of a run with so many groups in flight at once, 8 episodes each."""
        run = replace(
            SHORT,
            prompts_per_step=num_groups // 2,
            num_steps=2,
            num_replicas=num_groups // 8,
            engine=ClockSettings(tokens_per_id=500, num_slots=32),
            lookahead=Lookahead(
                prompts_per_step=num_groups // 2, max_staleness=1, total_steps=2, window=window
            ),
        )
        with count_lines() as counted:
            result = run_virtual(train_on_clock(run, Path(tempfile.mkdtemp(dir=tmp_path))))
        assert result.work.num_trajectories == 8 * num_groups
        return counted.number

    lines(8)  # fills caches
    few = (lines(16) - lines(8)) / 8
    many = (lines(112) - lines(96)) / 16
    assert many <= 1.05 * few


def test_lines_are_counted_and_so_are_the_turns_of_a_loop_within_one() -> None:
    numbers = range(1000)
    with count_lines() as few:
        _ = [number for number in numbers[:10] if number < 0]
    with count_lines() as many:
        _ = [number for number in numbers if number < 0]
    assert many.number - few.number == 990
