"""Reward models in a pool of their own: what stays with the episodes, and what runs there.

::

    PlacedPart ── messages ──► ScoringService ──► RewardModels, in a process of the pool
    a grader like any other    knows where        one HFClassifier for each part

Conversations travel as messages: only the pool needs the files of the reward model, and episodes of
all rollout workers share its batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.env.base import Episode
from agentrl.errors import ConfigError
from agentrl.reward.checks import arguments_key, part_configs
from agentrl.reward.classifier import HFClassifier
from agentrl.reward.config import RewardConfig, RewardPartConfig
from agentrl.reward.registry import make_grader
from agentrl.types import Message

PLACED_ID = "hf_classifier"
"""Parts with this id are what the role ``reward_model`` holds."""


class ScoringService(Protocol):
    """Reward models somewhere else. Can be pickled, to be handed to those who play episodes."""

    async def score(
        self, part: str, messages: Sequence[Message], *, timeout_s: float
    ) -> dict[str, float]:
        """Score a conversation by the reward model of ``part``.

        Args:
            timeout_s: for the batch that the conversation comes into; waiting for its turn does not
                count.

        Raises:
            RewardServiceError: the service is lost, hangs, or did not compute the batch in time.
            RewardError: the reward model's template refuses the conversation.
        """
        ...


@dataclass(slots=True, frozen=True)
class PlacedPart:
    """A grader that asks a reward model elsewhere."""

    service: ScoringService
    part: str
    """Name of the part that the reward model is."""

    async def grade(self, episode: Episode, *, timeout_s: float) -> dict[str, float]:
        """Return the model's score, and ``cut_tokens``. Raises as :meth:`ScoringService.score`."""
        return await self.service.score(self.part, episode.messages, timeout_s=timeout_s)


class RewardModels:
    """Every reward model of a run, in the process that they live in.

    Args:
        config: the run's reward; its parts ``hf_classifier`` are held here.

    Raises:
        ConfigError: there is none, or its arguments cannot work. Nothing is loaded yet.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._models = {
            name: _classifier(entry, key, name) for key, name, entry in placed_parts(config)
        }
        if not self._models:
            raise ConfigError(
                f"placement.roles.reward_model is set, but no part of the reward is a {PLACED_ID}; "
                "add one to reward.parts, or leave the role out"
            )

    async def open(self) -> None:
        """Load every model.

        Raises:
            ConfigError: one cannot be used; see :class:`~agentrl.reward.classifier.HFClassifier`.
        """
        for model in self._models.values():
            await model.open()

    async def score(
        self, part: str, messages: Sequence[Message], timeout_s: float
    ) -> dict[str, float]:
        """Score a conversation; see :class:`ScoringService`."""
        return await self._models[part].score_messages(messages, timeout_s=timeout_s)

    async def close(self) -> None:
        """Let go of the models."""
        await asyncio.gather(*(model.close() for model in self._models.values()))


def placed_parts(config: RewardConfig) -> list[tuple[str, str, RewardPartConfig]]:
    """Return key, name and settings of the parts that a pool may hold."""
    return [
        (key, entry.name or entry.id, entry)
        for key, entry in part_configs(config)
        if entry.id == PLACED_ID
    ]


def _classifier(entry: RewardPartConfig, key: str, name: str) -> HFClassifier:
    given: dict[str, Any] = {"part_name": name, "config_key": arguments_key(key)}
    grader = make_grader(entry.id, entry.kwargs, given=given, key=key)
    assert isinstance(grader, HFClassifier)
    return grader
