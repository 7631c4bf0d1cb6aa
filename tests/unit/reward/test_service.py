"""Reward models elsewhere: what is asked, by whom, and what an episode gets of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.env.base import Episode
from agentrl.errors import ConfigError, RewardServiceError
from agentrl.reward.config import RewardConfig, RewardPartConfig
from agentrl.reward.part import Part
from agentrl.reward.run import make_reward
from agentrl.reward.service import PlacedPart, RewardModels
from agentrl.testing.random_classifier import save_classifier
from agentrl.types import Message


class Recorder:
    """A service that scores by length."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, float]] = []

    async def score(
        self, part: str, messages: Sequence[Message], *, timeout_s: float
    ) -> dict[str, float]:
        self.asked.append((part, len(messages), timeout_s))
        if part == "lost":
            raise RewardServiceError("replica 0 is gone")
        return {"score": float(len(messages)), "cut_tokens": 1.0}


def reward(*parts: RewardPartConfig) -> RewardConfig:
    return RewardConfig(parts=list(parts))


def classifier(name: str = "", model: str = "some/model", **how: float) -> RewardPartConfig:
    return RewardPartConfig(id="hf_classifier", name=name, kwargs={"model": model}, **how)


def test_classifiers_alone_are_asked_elsewhere_under_their_names(make_episode) -> None:
    service = Recorder()
    config = reward(
        classifier("rm", weight=0.5, timeout_s=7.0),
        classifier(),
        RewardPartConfig(id="format", kwargs={"pattern": "x"}),
    )
    made = make_reward(config, reward_timeout_s=30.0, given={}, service=service)
    graders = {part.name: part.grader for part in made.parts if isinstance(part, Part)}
    assert [name for name, grader in graders.items() if isinstance(grader, PlacedPart)] == [
        "rm",
        "hf_classifier",
    ]
    episode: Episode = make_episode("hello", "again")
    grades = [asyncio.run(part.grade(episode)) for part in made.parts if isinstance(part, Part)]
    assert service.asked == [("rm", 5, 7.0), ("hf_classifier", 5, 30.0)]
    assert grades[0].value == 5.0 and grades[0].entries == {"rm/cut_tokens": 1.0}


def test_a_lost_service_is_an_error_of_infrastructure_that_names_the_part(make_episode) -> None:
    part = Part("rm", PlacedPart(Recorder(), "lost"))
    with pytest.raises(RewardServiceError, match="reward part 'rm': replica 0 is gone"):
        asyncio.run(part.grade(make_episode("hello")))


def test_the_pool_scores_as_the_part_in_process_does(tmp_path: Path, make_episode) -> None:
    model = save_classifier(tmp_path / "rm", num_labels=2)
    entry = classifier("rm", model)
    entry.kwargs |= {"max_tokens": 256, "label": 1, "device": "cpu"}
    episode = make_episode("hello", "there")

    async def main() -> tuple[float, float]:
        models = RewardModels(reward(entry))
        await models.open()
        elsewhere = await models.score("rm", episode.messages, 30.0)
        await models.close()
        made = make_reward(reward(entry), reward_timeout_s=30.0, given={})
        [part] = [part for part in made.parts if isinstance(part, Part)]
        in_process = await part.grade(episode)
        await part.close()
        return elsewhere["score"], in_process.value

    first, second = asyncio.run(main())
    assert first == second != 0.0


def test_a_pool_with_nothing_to_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="placement.roles.reward_model is set, but no part"):
        RewardModels(reward(RewardPartConfig(id="format", kwargs={"pattern": "x"})))


def test_arguments_are_checked_before_anything_is_loaded() -> None:
    bad = classifier("rm", "./no_such_directory")
    with pytest.raises(ConfigError, match=r"reward.parts\[0\].*no such directory"):
        RewardModels(reward(bad))
