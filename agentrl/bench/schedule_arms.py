"""Other schedules than ours, to compare with: what waits for what between the turns of a step.

* ``batch``: a call generates for a fixed batch and ends with its longest answer; then the next
  batch begins. The next turn begins as with ``barrier``.
* ``barrier``: all requests of a turn go to the engines at once, which fill their slots as answers
  end; the next turn begins when every answer and every tool of this one is there.
* ``async``: each episode goes on by itself. This is how agentrl plays.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

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

    def __init__(self, generate: GenerateFn, *, size: int, parties: int) -> None:
        self._generate = generate
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
                generated = await asyncio.gather(*(self._generate(request) for request, _ in batch))
                for (_, answer), generation in zip(batch, generated, strict=True):
                    if not answer.done():
                        answer.set_result(generation)
        except Exception as error:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)


class TurnBarrier:
    """Generates a turn once everybody has asked for theirs: the one before has then ended for all.

    Args:
        parties: episodes; all have the same number of turns.
    """

    def __init__(self, generate: GenerateFn, *, parties: int) -> None:
        self._generate = generate
        self._barrier = asyncio.Barrier(parties)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Wait for the others, then generate."""
        await self._barrier.wait()
        return await self._generate(request)


def generate_by(
    schedule: Schedule, generate: GenerateFn, *, batch: int, parties: int
) -> GenerateFn:
    """Return how a turn is generated under a schedule.

    Args:
        batch: requests of one call, for ``batch``.
        parties: episodes that play at a time, each with the same number of turns.
    """
    match schedule:
        case Schedule.BATCH:
            return StaticBatches(generate, size=batch, parties=parties).generate
        case Schedule.BARRIER:
            return TurnBarrier(generate, parties=parties).generate
        case Schedule.ASYNC:
            return generate
