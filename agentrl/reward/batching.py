"""Concurrent requests to one model, answered in batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from agentrl.errors import RewardServiceError
from agentrl.tool.deadline import DeadlinePassed, OffLoop

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Collects what is asked within a short window and has it answered off the event loop.

    One batch is computed at a time; what is asked meanwhile forms the next one.

    Args:
        compute: ``(items) -> answers``, one each, in order; runs on a thread.
        max_items: of a batch.
        window_s: how long a first request waits for others.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Item]], Sequence[Answer]],
        *,
        max_items: int,
        window_s: float,
    ) -> None:
        self._compute = compute
        self._max_items = max_items
        self._window_s = window_s
        self._waiting: deque[tuple[Item, float, asyncio.Future[Answer]]] = deque()
        self._off_loop = OffLoop()
        self._full = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, item: Item, *, timeout_s: float) -> Answer:
        """Return the answer to ``item``.

        Raises:
            RewardServiceError: its batch was not computed within the shortest ``timeout_s`` of its
                members, counted from when the batch was begun.
            Exception: what ``compute`` raised.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, timeout_s, future))
        if len(self._waiting) >= self._max_items:
            self._full.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def close(self) -> None:
        """Stop; what has no answer yet is cancelled."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait((self._worker,))
        while self._waiting:
            self._waiting.popleft()[2].cancel()

    async def _work(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._max_items:
                self._full.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._window_s):
                        await self._full.wait()
            batch = [
                self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_items))
            ]
            # Those whose episode was cancelled meanwhile cost nothing.
            await self._answer([request for request in batch if not request[2].done()])

    async def _answer(self, batch: Sequence[tuple[Item, float, asyncio.Future[Answer]]]) -> None:
        if not batch:
            return
        timeout_s = min(timeout_s for _, timeout_s, _ in batch)
        items = [item for item, _, _ in batch]
        error: BaseException | None = None
        answers: Sequence[Answer] = ()
        try:
            answers = await self._off_loop.run(lambda: self._compute(items), timeout_s)
        except DeadlinePassed:
            error = RewardServiceError(
                f"the reward model did not score a batch of {len(items)} within {timeout_s:g} s"
            )
        except asyncio.CancelledError:
            for _, _, future in batch:
                future.cancel()
            raise
        except Exception as caught:  # handed to everyone who waits for this batch
            error = caught
        for index, (_, _, future) in enumerate(batch):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answers[index])
