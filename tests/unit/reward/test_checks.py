"""Reward settings: what they come to, and what is refused before anything loads."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.load import load, to_dict
from agentrl.errors import ConfigError
from agentrl.reward.checks import part_configs
from agentrl.reward.config import OverlongConfig, RewardConfig, RewardPartConfig, Solution

BASE = ["env.id=guess_number", "model.path=tiny"]


def names(config: RewardConfig) -> list[str]:
    return [part.name or part.id for _, part in part_configs(config)]


def test_shorthands_come_to_parts_in_order():
    overlong = OverlongConfig(buffer_tokens=8)
    parts = [RewardPartConfig(id="env"), RewardPartConfig(id="format", name="tags")]
    assert names(RewardConfig()) == []
    assert names(RewardConfig(path="m:f")) == ["score"]
    assert names(RewardConfig(parts=parts)) == ["env", "tags"]
    # A punishment alone is no reward: the environment's own is kept.
    assert names(RewardConfig(overlong=overlong)) == ["env", "overlong"]
    assert names(RewardConfig(path="m:f", parts=parts, overlong=overlong)) == [
        "score", "env", "tags", "overlong",
    ]  # fmt: skip


def test_settings_are_read_from_the_command_line_and_written_back():
    config = load(
        [
            *BASE,
            "reward.path=./r.py:fn",
            "reward.kwargs.tolerance=0.1",
            "reward.solution=all_turns",
            "reward.parts=[{id: format, weight: 0.1, kwargs: {pattern: '<a>'}}]",
            "reward.overlong.buffer_tokens=16",
        ]
    )
    assert config.reward.kwargs == {"tolerance": 0.1}
    assert config.reward.solution is Solution.all_turns
    assert config.reward.parts[0].kwargs == {"pattern": "<a>"}
    assert to_dict(config)["reward"]["parts"][0]["weight"] == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward.path=fn"], "reward.path='fn': write './file.py:function'"),
        (["reward.kwargs.x=1"], "reward.kwargs is for the function of reward.path"),
        (["reward.process=true"], "reward.process is for the function"),
        (["reward.solution=all_turns"], "reward.solution is for the function"),
        (["reward.parts=[{id: env, name: outcome}]"], r"parts\[0\].*named 'outcome'; set another"),
        (["reward.parts=[{id: env, name: turn}]"], "named 'turn'"),
        (["reward.parts=[{id: env, name: tool}]"], "named 'tool'"),
        (["reward.parts=[{id: judgge}]"], r"reward.parts\[0\].id='judgge'.*did you mean judge"),
        (["reward.parts=[{id: env}, {id: env}]"], r"parts\[0\] and reward.parts\[1\].*'env'"),
        (["reward.parts=[{id: env, timeout_s: 3}]"], "rollout.reward_timeout_s"),
        (["reward.parts=[{id: env, kwargs: {a: 1}}]"], "its arguments are env.kwargs"),
        (["reward.parts=[{id: format, timeout_s: 0}]"], "timeout_s=0.0: a deadline"),
        (["reward.parts=[{id: format, weight: nan}]"], "weight=nan: must be a finite"),
        (["reward.parts=[{id: format, weight: 0}]"], "every part has weight 0"),
        (["reward.overlong.buffer_tokens=-1"], "between 0"),
        (["reward.overlong.buffer_tokens=99999"], "rollout.max_response_tokens="),
        (["reward.overlong.penalty=-1"], "what is taken off at the limit"),
        (["reward.success_part=a"], "none .set reward.path or reward.parts"),
        (["reward.success_threshold=0.5"], "no part to compare"),
        (["reward.path=m:f", "reward.success_part=a"], "the parts are: score"),
        (["reward.path=m:f", "reward.success_threshold=inf"], "must be a finite number"),
        (["reward.pth=m:f"], "reward.path"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: list[str], message: Any):
    with pytest.raises(ConfigError, match=message):
        load([*BASE, *settings])
