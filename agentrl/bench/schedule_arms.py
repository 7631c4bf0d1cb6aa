"""Other schedules than ours, to compare with: what waits for what between the turns of a step.

* ``batch``: a call generates for a fixed batch and ends with its longest answer; then the next batch
  begins; tools run when all batches of the turn are done.
* ``barrier``: all requests of a turn go to the engines at once, which fill their slots as answers
  end; the next turn begins when every answer and every tool of this one is there.
* ``async``: each episode goes on by itself. This is how agentrl plays.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from agentrl.rollout.engine import RolloutEngine
from agentrl.types import GenerateFn, GenerateRequest, Generation


class Schedule(StrEnum):
    """What waits for what."""

    BATCH = "batch"
    BARRIER = "barrier"
    ASYNC = "async"


class StaticBatches:
    """Generates in batches of fixed size, one after the other, once everybody has asked.

    Args:
        size: of a batch.
        parties: requests of a turn; all come before any is answered.
    """

    def __init__(self, engine: RolloutEngine, *, size: int, parties: int) -> None:
        self._engine = engine
        self._size = size
        self._parties = parties
        self._asked: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Wait for the turn of the batch that the request is in, and for its longest answer."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._asked.append((request, answer))
        if len(self._asked) == self._parties:
            asked, self._asked = self._asked, []
            task = asyncio.create_task(self._run(asked))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await answer

    async def _run(self, asked: list[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        try:
            for start in range(0, len(asked), self._size):
                batch = asked[start : start + self._size]
                generated = await asyncio.gather(
                    *(self._engine.generate(request) for request, _ in batch)
                )
                for (_, answer), generation in zip(batch, generated, strict=True):
                    if not answer.done():
                        answer.set_result(generation)
        except Exception as error:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)


def generate_by(
    schedule: Schedule, engine: RolloutEngine, *, batch: int, parties: int
) -> GenerateFn:
    """Return how a turn is generated under a schedule."""
    if schedule is Schedule.BATCH:
        return StaticBatches(engine, size=batch, parties=parties).generate
    return engine.generate


def turn_barrier(schedule: Schedule, parties: int) -> asyncio.Barrier | None:
    """Return where the episodes of a step wait for each other after every turn, if they do."""
    return None if schedule is Schedule.ASYNC else asyncio.Barrier(parties)
