"""Two real vLLM engines behind one face: one is killed in mid-sentence, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import pytest

from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.replica_set import ReplicaSet
from agentrl.testing.random_models import build
from agentrl.types import GenerateRequest, Generation, SamplingParams
from agentrl.weights.served import ServedWeights

pytestmark = pytest.mark.timeout(900)
NUM_KILLS = 5 if os.environ.get("AGENTRL_SOAK") else 1
NUM_SESSIONS = 12
TOKENS = 160


class Rollouts:
    """Plays sessions of two turns, and notes which have ended."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas
        self.ended: Counter[str] = Counter()

    async def session(self, name: str, seed: int) -> list[Generation]:
        prompt = [(seed * 13 + i * 7) % 97 for i in range(40)]
        turns = []
        for turn in range(2):
            sampling = SamplingParams(max_tokens=TOKENS, seed=seed * 10 + turn)
            asked = GenerateRequest(prompt_ids=prompt, sampling=sampling, session_id=name)
            turns.append(await self.replicas.generate(asked))
            prompt = [*prompt, *turns[-1].ids, 5, 6, 7]
        await self.replicas.end_session(name)
        self.ended[name] += 1
        return turns

    async def all(self, round_: int) -> list[list[Generation]]:
        sessions = (self.session(f"{round_}/{i}", i) for i in range(NUM_SESSIONS))
        return await asyncio.gather(*sessions)


def test_a_killed_engine_costs_nothing_but_time_and_an_update_interrupts_without_loss() -> None:
    from agentrl.rollout.engines.config import VLLMEngineConfig
    from agentrl.rollout.engines.vllm import VLLMEngine

    model, other = build("tiny-qwen3", seed=1), build("tiny-qwen3", seed=2)
    spawned: list[VLLMEngine] = []
    config = VLLMEngineConfig(max_context=512, max_num_seqs=8, deterministic=True)

    def spawn(number: int) -> RolloutEngine:
        spawned.append(VLLMEngine(model, config))
        return spawned[-1]

    async def republish(engine: RolloutEngine) -> ServedWeights:
        return await engine.update_weights(model.named_parameters(), replicas.policy_version)

    replicas = ReplicaSet(spawn, 2, ServingConfig(affinity_slack=0), republish=republish)

    async def main() -> None:
        await replicas.start()
        try:
            await replicas.update_weights(model.named_parameters(), 1)
            killed_with = await play_under_kills(replicas, spawned)
            found = replicas.metrics()
            assert min(killed_with) > 0, "the fault fired while nothing was running"
            assert found["serving/replays"] == sum(killed_with)
            assert found["serving/restarts"] == NUM_KILLS and len(spawned) == 2 + NUM_KILLS
            assert found["serving/cache_hit_rate"] > 0.3
            await interrupt(replicas, model, other)
        finally:
            await replicas.close()

    asyncio.run(main())


async def play_under_kills(replicas: ReplicaSet, spawned: list[Any]) -> list[int]:
    """Play rounds of the same sessions; returns how many turns each kill fell into."""
    rollouts, killed_with = Rollouts(replicas), []
    whole = ids_of(await rollouts.all(0))
    for round_ in range(1, NUM_KILLS + 1):
        running = asyncio.create_task(rollouts.all(round_))
        victim = await busy(spawned, running)
        killed_with.append(victim.num_unfinished)
        os.kill(victim.pid, signal.SIGKILL)
        assert ids_of(await running) == whole
        async with asyncio.timeout(300):
            while replicas.metrics()["serving/replicas"] < 2:
                await asyncio.sleep(0.1)
    assert ids_of(await rollouts.all(NUM_KILLS + 1)) == whole  # with the new engine's help
    names = [f"{r}/{i}" for r in range(NUM_KILLS + 2) for i in range(NUM_SESSIONS)]
    assert rollouts.ended == Counter(names)
    return killed_with


def ids_of(sessions: list[list[Generation]]) -> list[list[list[int]]]:
    return [[turn.ids for turn in turns] for turns in sessions]


async def interrupt(replicas: ReplicaSet, old: Any, new: Any) -> None:
    """Change the weights in mid-sentence, and compare each token with the model it came from."""
    asked = [
        GenerateRequest(
            prompt_ids=[(13 * i + k) % 97 for k in range(40)],
            sampling=SamplingParams(max_tokens=400, temperature=0.0),
            session_id=f"greedy {i}",
        )
        for i in range(6)
    ]
    tasks = [asyncio.create_task(replicas.generate(item)) for item in asked]
    await asyncio.sleep(0.3)
    await replicas.update_weights(new.named_parameters(), 2, interrupt=True)
    turns = await asyncio.gather(*tasks)
    assert any(set(turn.policy_version) == {1, 2} for turn in turns)
    for request, turn in zip(asked, turns, strict=True):
        assert len(turn.ids) == 400 and turn.policy_version == sorted(turn.policy_version)
        sequence = [*request.prompt_ids, *turn.ids]
        for version, model in ((1, old), (2, new)):
            places = [i for i, found in enumerate(turn.policy_version) if found == version]
            expected = greedy_at(model, sequence, len(request.prompt_ids), places)
            assert [turn.ids[place] for place in places] == expected


async def busy(engines: list[Any], running: asyncio.Task[Any]) -> Any:
    """Wait until an engine is in the middle of turns; return it."""
    async with asyncio.timeout(120):
        while True:
            assert not running.done(), "everything ended before anything could be killed"
            for engine in engines[-2:]:
                if engine.num_unfinished:
                    await asyncio.sleep(0.1)
                    if engine.num_unfinished:
                        return engine
            await asyncio.sleep(0.01)


def greedy_at(model: Any, sequence: list[int], start: int, places: list[int]) -> list[int]:
    """Return what a model would say at places of a turn, given all that was said before."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0]
    return [int(logits[start + place - 1].argmax()) for place in places]
