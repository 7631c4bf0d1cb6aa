"""What a run asks of its environments, seen before a model loads."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.environments import credit_configs
from agentrl.config.load import load
from agentrl.env.base import Env, Episode
from agentrl.errors import ConfigError
from agentrl.reward.part import Part
from agentrl.reward.rubric import ComposedRubric
from agentrl.testing import EchoEnv
from agentrl.train.environments import make_environments
from agentrl.train.requirements import refuse_unmet
from agentrl.types import Score


class Bare(Env):
    """An environment without the optional methods."""

    def tasks(self, split: str) -> list[Any]:
        return []


def graded(episode: Episode) -> float:
    return 1.0


class Composed(Bare):
    rubric = ComposedRubric(Part("correct", graded), Part("style", graded, weight=0.0))


class Opaque(Bare):
    class _Rubric:
        def score(self, episode: Episode) -> Score:
            return Score(reward=1.0, success=True, parts={"tests": 1.0})

    rubric = _Rubric()


class AsyncPlain:
    """An asynchronous environment without the optional methods."""

    tools = ()
    rubric = None

    def tasks(self, split: str) -> list[Any]:
        return []

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any: ...

    async def step(self, action: Any) -> Any: ...

    async def close(self) -> None: ...


def meet(env: type, *overrides: str) -> None:
    config = load([f"env.id='{env.__module__}:{env.__qualname__}'", *overrides])
    refuse_unmet(make_environments(config.env, config.tools), config, credit_configs(config))


def unmet(env: type, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        meet(env, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("env", [Bare, AsyncPlain])
def test_states_are_compared_only_where_the_environment_names_them(env: type) -> None:
    message = unmet(env, "algo=gigpo")
    assert message.startswith("algo.advantage=gigpo compares turns that start from equal states")
    assert f"no anchor(): implement it in {env.__qualname__}" in message
    assert "turn_return" in message
    meet(env, "algo=turn_return")
    meet(EchoEnv, "algo=gigpo")


def test_episodes_branch_only_where_the_environment_can_go_back() -> None:
    branching = ["rollout.tree.rounds=1", "algo.advantage=tree"]
    assert "has no snapshot and no restore" in unmet(Bare, *branching)
    meet(EchoEnv, *branching)


def test_a_reward_that_nobody_gives_is_refused() -> None:
    assert Bare.rubric is None
    message = unmet(Bare, "algo.reward_weights.correct=1")
    assert "algo.reward_weights.correct=1.0: no part" in message
    assert "known: outcome, turn, tool" in message


def test_a_misspelt_part_of_a_rubric_is_refused_and_another_is_left_to_the_first_episode() -> None:
    message = unmet(Composed, "algo.reward_weights={outcome: 0, corect: 1}")
    assert "did you mean correct? known: outcome, turn, tool, correct, style" in message
    meet(Composed, "algo.reward_weights={outcome: 0, correct: 1}")
    meet(Composed, "algo.reward_weights={outcome: 0, correct/lines: 1}")
    meet(Composed, "algo.reward_weights={outcome: 0, elegance: 1}")
    meet(Opaque, "algo.reward_weights={outcome: 0, tests: 1}")


def test_a_part_does_not_count_by_itself_and_in_the_outcome() -> None:
    message = unmet(Composed, "algo.reward_weights.correct=1")
    assert "algo.reward_weights.correct=1.0 with outcome=1.0" in message
    assert "would count twice; set algo.reward_weights.outcome=0" in message
    meet(Composed, "algo.reward_weights.style=1")  # its weight in the outcome is 0


def test_a_reward_of_the_run_takes_the_place_of_the_environments_own() -> None:
    parts = "reward.parts=[{id: format, kwargs: {pattern: a}}]"
    meet(Composed, parts, "algo.reward_weights={outcome: 0, format: 1}")


def test_an_entry_of_a_mix_is_named() -> None:
    config = load(
        [
            f"env.mix=[{{id: '{EchoEnv.__module__}:EchoEnv'}}, "
            f"{{id: '{__name__}:Composed', algo: {{gamma: 0.5}}}}]",
            "algo=gigpo",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        refuse_unmet(make_environments(config.env), config, credit_configs(config))
    assert str(caught.value).startswith("env.mix[1].algo.advantage=gigpo compares")
