"""Replicas that do nothing by themselves, and a set over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.control import Republish
from agentrl.rollout.serving.replica_set import ReplicaSet
from agentrl.testing.fake_replica import STOP_ID, FakeReplica
from agentrl.types import GenerateRequest, SamplingParams

WEIGHTS = [("weight", torch.arange(4.0))]


def request(session: str, *, seed: int = 11, max_tokens: int = 50) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_ID,), seed=seed)
    return GenerateRequest(prompt_ids=[1, 2, 3], sampling=sampling, session_id=session)


async def settle() -> None:
    """Let everything happen that needs no token."""
    for _ in range(60):
        await asyncio.sleep(0)


class Stage:
    """A set, and the replicas that it has spawned, in order."""

    def __init__(self, make: Callable[[int], FakeReplica]) -> None:
        self.spawned: list[FakeReplica] = []
        self._make = make
        self.set: ReplicaSet

    def spawn(self, number: int) -> FakeReplica:
        self.spawned.append(self._make(number))
        return self.spawned[-1]

    def tick(self, count: int = 1) -> None:
        for replica in self.spawned:
            replica.tick(count)

    async def run(self, *tasks: asyncio.Task[object], ticks: int = 200) -> None:
        """Go on until the tasks are done."""
        for _ in range(ticks):
            await settle()
            if all(task.done() for task in tasks):
                return
            self.tick()
        raise AssertionError(f"unfinished: {[t for t in tasks if not t.done()]}")


@asynccontextmanager
async def stage(
    num_replicas: int = 2,
    *,
    make: Callable[[int], FakeReplica] = FakeReplica,
    republish: Republish | None = None,
    bucket_bytes: int = 128,
    **settings: object,
) -> AsyncIterator[Stage]:
    given: dict[str, object] = {"restart_pause_s": 0.0, "health_interval_s": 3600.0} | settings
    found = Stage(make)
    config = ServingConfig(**given)  # type: ignore[arg-type]
    found.set = ReplicaSet(
        found.spawn, num_replicas, config, republish=republish, bucket_bytes=bucket_bytes
    )
    await found.set.start()
    try:
        yield found
    finally:
        await found.set.close()
