"""Episodes without an agent loop: requests, latencies, and a record that can be trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from agentrl.rollout.groups import Sample
from agentrl.seeding import derive_seed
from agentrl.testing.clock_env import ClockEnv
from agentrl.types import (
    GenerateFn,
    GenerateRequest,
    SamplingParams,
    Score,
    Segment,
    StopReason,
    TokenRole,
    Trajectory,
    Turn,
)

PROMPT_ID = 5
CONTEXT_IDS = 1
"""Ids that the environment adds between two turns."""
_EVERYTHING = 1_000_000


class ShortEpisodes:
    """Asks an engine for turns as the agent loop does, of a :class:`ClockEnv`.

    Args:
        env: arguments of the environment.
    """

    def __init__(
        self,
        generate: GenerateFn,
        end_session: Callable[[str], Awaitable[None]],
        env: Mapping[str, Any],
    ) -> None:
        self._generate = generate
        self._end_session = end_session
        self._env = ClockEnv(**env)

    async def play(self, sample: Sample) -> Trajectory:
        """Play one episode."""
        name = f"{sample.group_id}/{sample.sample_index}.{sample.attempt}"
        ids, versions, turns = [PROMPT_ID], [-1], list[Turn]()
        for index in range(self._env.num_turns):
            generation = await self._generate(
                GenerateRequest(
                    prompt_ids=ids,
                    sampling=SamplingParams(
                        max_tokens=_EVERYTHING,
                        seed=derive_seed(sample.seed, index),
                        stop_token_ids=(PROMPT_ID,),
                    ),
                    session_id=name,
                )
            )
            start, end = len(ids), len(ids) + len(generation.ids)
            last = index == self._env.num_turns - 1
            num_context = 0 if last else CONTEXT_IDS
            ids = [*ids, *generation.ids, *[PROMPT_ID] * num_context]
            versions += [*generation.policy_version, *[-1] * num_context]
            turns.append(
                Turn(
                    index=index,
                    segment=0,
                    start=start,
                    end=end,
                    stop_reason=generation.stop_reason,
                    terminated=last,
                )
            )
            await asyncio.sleep(self._env.latency_s(sample.seed, index))
        await self._end_session(name)
        return _trajectory(sample, name, ids, versions, turns, self._env.reward(sample.seed))


def _trajectory(
    sample: Sample, name: str, ids: list[int], versions: list[int], turns: list[Turn], reward: float
) -> Trajectory:
    version = np.asarray(versions, np.int32)
    sampled = version >= 0
    segment = Segment(
        ids=np.asarray(ids, np.int64),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        policy_version=version,
        roles=np.where(sampled, TokenRole.SAMPLED, TokenRole.USER).astype(np.int8),
    )
    return Trajectory(
        id=name,
        env_id="clock",
        task=sample.task,
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        attempt=sample.attempt,
        seed=sample.seed,
        segments=[segment],
        turns=turns,
        messages=[],
        stop_reason=StopReason.TERMINATED,
        score=Score(reward=reward, success=reward > 0),
    )
