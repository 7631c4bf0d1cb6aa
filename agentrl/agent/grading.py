"""The outcome of an episode: from the rubric, or from what the environment said last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.env.base import Episode
from agentrl.env.hosted import HostedRubric
from agentrl.errors import EnvError, RewardError
from agentrl.types import Score


async def grade(rubric: HostedRubric | None, episode: Episode, *, env_id: str) -> Score:
    """Return the score; what the rubric says of single turns is added to their rewards.

    Without a rubric the outcome is 0 and ``info["success"]``, or else a positive sum of rewards,
    says whether the episode succeeded.

    Raises:
        RewardError: the rubric rewards turns that were not played.
        EnvError: ``info["success"]`` is no bool.
    """
    if rubric is None:
        return Score(reward=0.0, success=_success(episode.info, sum(episode.turn_rewards), env_id))
    score = await rubric.score(episode)
    if len(score.turn_rewards) > len(episode.turns):
        raise RewardError(
            f"environment {env_id!r}: the rubric rewards {len(score.turn_rewards)} turns of an "
            f"episode of {len(episode.turns)}"
        )
    for turn, reward in zip(episode.turns, score.turn_rewards, strict=False):
        turn.reward += reward
    return score


def _success(info: Mapping[str, Any], reward: float, env_id: str) -> bool:
    success = info.get("success")
    if success is None:
        return reward > 0
    if not isinstance(success, (bool, np.bool_)):
        raise EnvError(
            f"environment {env_id!r}: info['success'] must be a bool, "
            f"got {success!r} ({type(success).__name__})"
        )
    return bool(success)
