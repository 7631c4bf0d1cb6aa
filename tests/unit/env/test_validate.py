from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.validate import (
    REWARD_LIMIT,
    check_artifacts,
    check_names,
    check_reset,
    check_reward,
    check_rubric,
    check_score,
    check_step,
)
from agentrl.errors import EnvError, RewardError
from agentrl.types import Score


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "reward",
    [
        math.nan, math.inf, -math.inf, None, "1.0", True, np.True_, 1e30, 10**400, -(10**400),
        [1.0], (1.0,), torch.tensor(1.0), np.array([1.0]), 1j, Fraction(1, 2), b"1", Unshowable(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_reward_that_is_no_finite_number_is_a_reward_error(reward: Any) -> None:
    with pytest.raises(RewardError, match="step: the reward"):
        check_step(("", reward, False, False, {}), env="e")


@pytest.mark.parametrize("reward", [0, 1, -2.5, np.float32(0.5), np.int64(3), np.float64(1e-12)])
def test_python_and_numpy_scalars_are_rewards(reward: Any) -> None:
    value = check_reward(reward, where="here")
    assert type(value) is float and value == float(reward)


@given(st.floats())
def test_every_float_passes_unchanged_or_is_refused(value: float) -> None:
    if math.isfinite(value) and abs(value) <= REWARD_LIMIT:
        assert check_reward(value, where="here") == value
    else:
        with pytest.raises(RewardError):
            check_reward(value, where="here")


@pytest.mark.parametrize(
    "observation",
    [
        None, 3, b"bytes", {"role": "user", "content": "x"}, ["text"], [{"role": "user"}],
        [{"role": "robot", "content": "x"}], [{"role": "user", "content": None}], [None],
        Unshowable(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_observation_of_the_wrong_type_is_an_env_error(observation: Any) -> None:
    with pytest.raises(EnvError, match="e: reset"):
        check_reset((observation, {}), env="e")
    with pytest.raises(EnvError, match="e: step"):
        check_step((observation, 0.0, False, False, {}), env="e")


def test_an_empty_observation_ends_a_step_but_not_a_reset() -> None:
    assert check_step(("", 0.0, True, False, {}), env="e")[0] == ""
    for empty in ("", " \n", [], ()):
        with pytest.raises(EnvError, match="empty"):
            check_reset((empty, {}), env="e")


@pytest.mark.parametrize("flag", [None, 0, 1, "False", []])
def test_flags_must_be_bool(flag: Any) -> None:
    with pytest.raises(EnvError, match="terminated="):
        check_step(("", 0.0, flag, False, {}), env="e")
    with pytest.raises(EnvError, match="truncated="):
        check_step(("", 0.0, False, flag, {}), env="e")
    assert check_step(("", 0.0, np.True_, False, {}), env="e")[2] is True


@pytest.mark.parametrize(
    "value", [None, (), ("a", 0.0, False, False), ["a", 0.0, False, False, {}]]
)
def test_a_step_that_is_no_tuple_of_five_is_an_env_error(value: Any) -> None:
    with pytest.raises(EnvError, match="step must return"):
        check_step(value, env="e")


@pytest.mark.parametrize(
    "score",
    [
        1.0, None, Score(reward=math.nan, success=True), Score(reward=1.0, success=1),  # type: ignore[arg-type]
        Score(reward=1.0, success=True, parts={"a": math.inf}),
        Score(reward=1.0, success=True, turn_rewards=(0.1, math.nan)),
        Score(reward=1.0, success=True, tampering="traces"),
        Score(reward=1.0, success=True, tampering=(1,)),  # type: ignore[arg-type]
        Score(reward="1", success=True),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_bad_score_is_a_reward_error(score: Any) -> None:
    with pytest.raises(RewardError):
        check_score(score, env="e")


def test_a_good_score_passes() -> None:
    score = Score(reward=0.5, success=False, parts={"a": 1}, turn_rewards=[0, 1])
    checked = check_score(score, env="e")
    assert checked == Score(reward=0.5, success=False, parts={"a": 1.0}, turn_rewards=(0.0, 1.0))


class LyingFloat(float):
    def __abs__(self) -> float:
        return 0.0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__

    def __float__(self) -> float:
        return math.nan


class LyingInt(int):
    def __abs__(self) -> int:
        return 0

    def __float__(self) -> float:
        return math.inf


@pytest.mark.parametrize(
    "reward", [LyingFloat("nan"), LyingFloat("inf"), LyingFloat(1e9), LyingInt(10**9)]
)
def test_a_number_that_lies_about_itself_is_judged_by_what_it_stores(reward: Any) -> None:
    with pytest.raises(RewardError, match="here: the reward is"):
        check_reward(reward, where="here")


def test_the_stored_value_of_a_subclass_is_the_reward() -> None:
    assert check_reward(LyingFloat(0.5), where="x") == 0.5
    assert check_reward(LyingInt(2), where="x") == 2.0


@pytest.mark.parametrize("turn_rewards", [None, 1.0, "12", {0: 1.0}])
def test_turn_rewards_that_are_no_sequence_are_a_reward_error(turn_rewards: Any) -> None:
    score = Score(reward=1.0, success=True, turn_rewards=turn_rewards)
    with pytest.raises(RewardError, match="turn_rewards must be a sequence"):
        check_score(score, env="e")


@pytest.mark.parametrize("tools", [None, 3, "python", {"a": 1}, [None], ["python", 3]])
def test_tools_that_are_no_names_are_an_environment_error(tools: Any) -> None:
    with pytest.raises(EnvError, match="e: tools must be a list of names"):
        check_names(tools, env="e", field="tools")


@pytest.mark.parametrize("rubric", [3, "score", object(), Score])
def test_a_rubric_that_cannot_score_is_an_environment_error(rubric: Any) -> None:
    with pytest.raises(EnvError, match="e: rubric must be None or an object with a method score"):
        check_rubric(rubric, env="e")


@pytest.mark.parametrize(
    "pattern",
    [
        "/etc/passwd", "~/a", "../a", "a/../b", "./main.py", "src/", "", "a\\b", "conftest.py",
        "tests/conftest.py", ".git/*", "*.pth",
    ],
)  # fmt: skip
def test_a_pattern_that_no_artifact_can_match_is_refused(pattern: str) -> None:
    with pytest.raises(EnvError, match="no file can match"):
        check_artifacts(["main.py", pattern], env="environment 'x'")


def test_patterns_that_may_match_are_kept() -> None:
    patterns = ("main.py", "src/*.py", "*", "out/[a-z]?.json", "**/*.md", ".env")
    assert check_artifacts(list(patterns), env="environment 'x'") == patterns
