"""The reward of a run: made from its configuration, bound to each environment that is opened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.agent.grading import grade
from agentrl.env.base import Episode
from agentrl.env.hosted import Hosted, HostedRubric
from agentrl.errors import AgentRLError, ConfigError
from agentrl.reward.checks import arguments_key, part_configs
from agentrl.reward.config import RewardConfig, RewardPartConfig
from agentrl.reward.function import RewardFunction
from agentrl.reward.part import Grader, Part
from agentrl.reward.registry import ENV, make_grader
from agentrl.reward.rubric import ComposedRubric
from agentrl.reward.service import PLACED_ID, PlacedPart, ScoringService
from agentrl.types import Score, Task


class EnvOutcome:
    """What the environment's own rubric says; without one, 0 and the environment's success.

    Args:
        env: hosted; its rubric keeps ``rollout.reward_timeout_s`` itself.
    """

    def __init__(self, env: Hosted) -> None:
        self._env_id = env.env_id
        self._rubric: HostedRubric | None = env.rubric

    async def grade(self, episode: Episode, *, timeout_s: float) -> Score:
        """Grade an episode. Raises as :meth:`agentrl.env.hosted.HostedRubric.score`."""
        if self._rubric is not None:
            return await self._rubric.score(episode)
        return await grade(None, episode, env_id=self._env_id)


@dataclass(slots=True, frozen=True, kw_only=True)
class RunReward:
    """The parts of a run's reward, open. Made by :func:`open_reward`."""

    config: RewardConfig
    parts: tuple[Part | RewardPartConfig, ...]
    """In order; an entry of the configuration stands for the environment's own rubric."""

    def bind(self, env: Hosted) -> None:
        """Have ``env`` graded by this reward in place of its own rubric."""
        parts = [
            part
            if isinstance(part, Part)
            else Part(part.name or ENV, EnvOutcome(env), weight=part.weight)
            for part in self.parts
        ]
        env.rubric = ComposedRubric(
            *parts, success=self.config.success_part, above=self.config.success_threshold
        )


def make_reward(
    config: RewardConfig,
    *,
    reward_timeout_s: float,
    given: Mapping[str, Any],
    service: ScoringService | None = None,
) -> RunReward:
    """Make every part; nothing is loaded or connected yet.

    Args:
        reward_timeout_s: deadline of parts that name none (``rollout.reward_timeout_s``).
        given: see :mod:`agentrl.reward.registry`.
        service: holds the reward models, where they are in a pool of their own.

    Raises:
        ConfigError, RegistryError: a part that cannot be made; the message says which.
    """
    parts: list[Part | RewardPartConfig] = []
    for key, entry in part_configs(config):
        if entry.id == ENV:
            parts.append(entry)
            continue
        name = entry.name or entry.id
        named = {"part_name": name, "config_key": arguments_key(key)}
        grader: Grader
        if service is not None and entry.id == PLACED_ID:
            grader = PlacedPart(service, name)
        else:
            grader = make_grader(entry.id, entry.kwargs, given={**given, **named}, key=key)
        timeout_s = reward_timeout_s if entry.timeout_s is None else entry.timeout_s
        parts.append(Part(name, grader, weight=entry.weight, timeout_s=timeout_s))
    return RunReward(config=config, parts=tuple(parts))


@asynccontextmanager
async def open_reward(
    config: RewardConfig,
    *,
    reward_timeout_s: float,
    given: Mapping[str, Any],
    examples: Sequence[Task] = (),
    service: ScoringService | None = None,
) -> AsyncIterator[RunReward | None]:
    """Open the reward of a run; None where environments grade for themselves.

    Args:
        reward_timeout_s, given, service: see :func:`make_reward`.
        examples: tasks that a function which reads ``task.data`` is shown, so that data without
            an answer are refused now and not after the first episode.

    Raises:
        ConfigError, RegistryError: a part that cannot be made or opened.
    """
    if not config.replaces_rubric:
        yield None
        return
    reward = make_reward(config, reward_timeout_s=reward_timeout_s, given=given, service=service)
    _check_examples(config, examples)
    graders = [part for part in reward.parts if isinstance(part, Part)]
    rubric = ComposedRubric(*graders) if graders else None
    try:
        if rubric is not None:
            await rubric.open()
    except AgentRLError as error:
        raise ConfigError(f"the reward cannot be opened: {error}") from error
    try:
        yield reward
    finally:
        if rubric is not None:
            await rubric.close()


def _check_examples(config: RewardConfig, examples: Sequence[Task]) -> None:
    for key, entry in part_configs(config):
        if entry.id == "function":
            function = RewardFunction(
                entry.kwargs["path"],
                kwargs=entry.kwargs.get("kwargs"),
                key=arguments_key(key),
            )
            try:
                for task in examples:
                    function.check_task(task)
            except AgentRLError as error:
                raise ConfigError(f"{key}: {error}") from error
