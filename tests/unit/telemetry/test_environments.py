"""What a mean over several environments would hide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.telemetry.charts import charts
from agentrl.telemetry.environments import environment_metrics, environment_rows
from agentrl.telemetry.metrics import rollout_metrics
from agentrl.telemetry.report import render_report
from agentrl.telemetry.run_dir import RunDir
from agentrl.testing.run_data import make_task, make_trajectory
from agentrl.types import StopReason, TrajectoryGroup


def group(env: str, solved: list[bool | None], seed: int = 0) -> TrajectoryGroup:
    """``None`` is a member that failed."""
    members = [
        make_trajectory(
            seed=seed,
            env_id=env,
            success=bool(success),
            identity=f"{env}{seed}{index}",
            stop_reason=StopReason.ENV_ERROR if success is None else StopReason.TERMINATED,
        )
        for index, success in enumerate(solved)
    ]
    return TrajectoryGroup(
        id=f"{env}{seed}", task=make_task(seed), env_id=env, trajectories=members, policy_version=0
    )


def test_each_environment_has_its_own_reward_success_and_signal() -> None:
    groups = [
        group("easy", [True, True], 1),
        group("easy", [True, None], 2),
        group("easy", [None, None], 3),
        group("./hard.py:Hard", [True, False], 4),
    ]
    groups[3].discarded = [replace(groups[1].trajectories[1])]
    found = environment_metrics(groups)
    assert found["group/easy/share"] == 0.75 and found["group/./hard.py:Hard/share"] == 0.25
    assert found["success/easy/mean"] == 1.0 and found["success/./hard.py:Hard/mean"] == 0.5
    assert found["reward/easy/mean"] > found["reward/./hard.py:Hard/mean"]
    # Of two groups with a scored member, both flat; of one, none.
    assert found["group/easy/zero_advantage_fraction"] == 1.0
    assert found["group/./hard.py:Hard/zero_advantage_fraction"] == 0.0
    assert found["trajectories/easy/failed"] == 3
    assert found["trajectories/./hard.py:Hard/failed"] == 1
    assert found.items() <= rollout_metrics(groups).items()


def test_means_of_nothing_have_no_key() -> None:
    found = environment_metrics([group("dead", [None, None])])
    assert found == {"group/dead/share": 1.0, "trajectories/dead/failed": 2}


def lines(*envs: str) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "reward/mean": 0.0,
            **{
                key: value
                for index, env in enumerate(envs)
                for key, value in {
                    f"group/{env}/share": 1 / len(envs),
                    f"group/{env}/zero_advantage_fraction": 0.5,
                    f"success/{env}/mean": 0.1 * step + index / 100,
                    f"reward/{env}/mean": 0.2 * step,
                    f"trajectories/{env}/failed": 2,
                }.items()
            },
        }
        for step in (1, 2, 3)
    ]


def test_a_run_is_summarised_from_its_first_to_its_last_steps() -> None:
    rows = environment_rows(lines("a", "b"), edge=1)
    assert [row.env_id for row in rows] == ["a", "b"]
    assert rows[1].success == pytest.approx((0.11, 0.31)) and rows[1].failed == 6
    assert rows[0].share == pytest.approx(0.5)
    assert environment_rows(lines("a"), edge=1) == [], "one environment is the whole run"


def test_an_environment_that_some_steps_lack_has_its_share_over_all_of_them() -> None:
    some = lines("a", "b")
    for key in [key for key in some[0] if "/b/" in key]:
        del some[0][key]
    (_, row) = environment_rows(some, edge=1)
    assert row.share == pytest.approx(1 / 3)


def test_curves_by_environment_are_drawn_where_there_are_several() -> None:
    titles = {chart.title: chart for chart in charts(lines("a", "./b.py:Bees"))}
    assert [item.label for item in titles["Success by environment"].series] == ["Bees", "a"]
    assert "Flat groups by environment" in titles
    assert not any("environment" in chart.title for chart in charts(lines("a")))


def test_the_report_evaluates_every_environment_apart(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as run:
        run.write_config(
            "env: {id: '', mix: [{id: sums, weight: 2.0, algo: {advantage: rloo}}, "
            "{id: b, name: bees, algo: {advantage: turn_return}}]}\nalgo: {advantage: opo}\n"
        )
        items = [
            make_trajectory(
                seed=i,
                task=make_task(i),
                env_id=env,
                identity=f"{env}{i}",
                group_id=f"eval-test-{env}-{i}",
                success=env == "sums",
            )
            for env in ("sums", "be-es")
            for i in range(3)
        ]
        run.write_evaluation(1, items)
    page = " ".join(render_report(run).read_text().split())
    assert "Evaluation in be-es on the test split" in page
    assert "Evaluation in sums on the test split" in page
    assert "sums × 2 (rloo), bees × 1 (turn_return)" in page
    assert ">opo<" not in page, "an estimator that no environment uses is not shown"
