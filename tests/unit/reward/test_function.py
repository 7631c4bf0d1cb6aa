"""A user's function: which of two signatures it has, and what it is given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.base import Episode
from agentrl.errors import ConfigError, RegistryError, RewardError
from agentrl.reward.config import Solution
from agentrl.reward.function import RewardFunction
from agentrl.types import Task

VERL = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 3},
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (data_source, solution_str, ground_truth, extra_info)


def without_extra(solution_str, ground_truth, data_source):
    return (data_source, solution_str, ground_truth)


def with_any(data_source, solution_str, ground_truth, **kwargs):
    return kwargs


def own(episode: Episode, *, scale: float = 1.0):
    return (episode.task.id, scale)


def test_a_function_with_verls_signature_is_given_the_task_in_verls_layout(make_episode):
    episode = make_episode("first", "the answer is 72", data=VERL)
    said = RewardFunction(compute_score)(episode)
    assert said == ("openai/gsm8k", "the answer is 72", "72", {"index": 3})
    assert RewardFunction(without_extra)(episode) == ("openai/gsm8k", "the answer is 72", "72")
    kwargs = {"tolerance": 0.1}
    assert RewardFunction(with_any, kwargs=kwargs)(episode) == {
        "extra_info": {"index": 3}, "tolerance": 0.1,
    }  # fmt: skip


def test_all_turns_are_joined_without_what_others_said(make_episode):
    example = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an example"}]
    episode = make_episode("one", "two", data=VERL, before=example)
    joined = RewardFunction(compute_score, solution=Solution.all_turns)(episode)
    assert joined[1] == "one\ntwo"
    assert RewardFunction(compute_score)(episode)[1] == "two"


def test_a_flat_ground_truth_and_a_data_source_from_the_settings_do_too(make_episode):
    episode = make_episode("x", data={"ground_truth": 5})
    function = RewardFunction(compute_score, kwargs={"data_source": "mine"})
    assert function(episode) == ("mine", "x", 5, None)


def test_a_function_of_the_episode_gets_it_and_its_kwargs(make_episode):
    assert RewardFunction(own, kwargs={"scale": 2.0})(make_episode("x")) == ("t1", 2.0)


def test_a_coroutine_function_is_called(make_episode):
    async def later(episode):
        return 0.5

    function = RewardFunction(later)
    assert asyncio.run(function(make_episode())) == 0.5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no 'reward_model'.*only: nothing"),
        ({"reward_model": {"style": "rule"}, "answer": 1}, "no 'reward_model'.*'answer'"),
        ({"ground_truth": "1"}, "no 'data_source'.*kwargs.data_source"),
    ],
)
def test_a_task_without_an_answer_is_an_error_that_says_what_it_has(data: Any, message: str):
    function = RewardFunction(compute_score)
    with pytest.raises(RewardError, match=message):
        function.check_task(Task(id="t", data=data))


def test_a_function_of_the_episode_wants_nothing_of_the_task():
    RewardFunction(own).check_task(Task(id="t", data={}))


def positional(episode, /):
    return 1.0


@pytest.mark.parametrize(
    "function",
    [lambda x: 1.0, lambda: 1.0, lambda solution_str, ground_truth: 1.0, positional],
)
def test_any_other_signature_is_refused_with_both_that_are_accepted(function):
    with pytest.raises(ConfigError) as caught:
        RewardFunction(function)
    assert "fn(episode, **kwargs)" in str(caught.value)
    assert "fn(data_source, solution_str, ground_truth, extra_info=None" in str(caught.value)


def test_a_function_that_wants_both_an_episode_and_verls_arguments_is_told_what_to_write():
    def both(data_source, solution_str, ground_truth, episode=None):
        return 1.0

    with pytest.raises(ConfigError, match=r"takes episode beside.*fn\(episode, \*\*kwargs\)"):
        RewardFunction(both)
    assert RewardFunction(both, kwargs={"episode": 3}).of_task


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (own, {"scael": 1.0}, "reward.kwargs.scael.*did you mean 'scale'"),
        (own, {"scale": "big"}, "reward.kwargs.scale: own takes float"),
        (own, {"episode": 1}, "gets episode from the episode"),
        (compute_score, {"ground_truth": 1}, "gets ground_truth from the episode"),
        (lambda episode, needed: 1.0, {}, "needs needed"),
    ],
)
def test_arguments_that_it_does_not_take_are_refused(function, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        RewardFunction(function, kwargs=kwargs)


def test_what_is_no_function_is_refused_with_the_fix(tmp_path: Path):
    file = tmp_path / "r.py"
    file.write_text("class Rubric:\n    def score(self, episode): ...\nVALUE = 3\n")
    with pytest.raises(ConfigError, match="reward.parts"):
        RewardFunction(f"{file}:Rubric")
    with pytest.raises(ConfigError, match="is no function but 3"):
        RewardFunction(f"{file}:VALUE")
    with pytest.raises(RegistryError, match="has no 'Rubrik'; did you mean Rubric"):
        RewardFunction(f"{file}:Rubrik")
    with pytest.raises(RegistryError, match="no file"):
        RewardFunction(f"{tmp_path}/none.py:f")
