"""Those who wait for a replica: first come, first served, woken by events."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from agentrl.rollout.serving.turn import Turn

P = TypeVar("P")


class WaitingLine(Generic[P]):
    """Turns in order of their tickets; a turn that comes back keeps its ticket, and so its place.

    ``P`` is the place that a turn is given.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Turn, asyncio.Future[P | None]]] = []

    def __len__(self) -> int:
        """Turns that wait."""
        return sum(not future.done() for _, _, future in self._heap)

    @property
    def any_waits(self) -> bool:
        """Whether anybody may wait: true of those that :meth:`serve` has left."""
        return bool(self._heap)

    def join(self, turn: Turn, ticket: int) -> asyncio.Future[P | None]:
        """Return what becomes the turn's place; None tells it to leave without one."""
        future: asyncio.Future[P | None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._heap, (ticket, turn, future))
        return future

    def serve(self, place: Callable[[Turn], P | None]) -> None:
        """Give places to the first in line until ``place`` has none left."""
        while self._heap:
            _, turn, future = self._heap[0]
            if future.done():  # cancelled, or sent away
                heapq.heappop(self._heap)
                continue
            found = place(turn)
            if found is None:
                return
            heapq.heappop(self._heap)
            future.set_result(found)

    def send_away(self, turn: Turn) -> bool:
        """Let a turn leave without a place; returns whether it waited."""
        for _, waiting, future in self._heap:
            if waiting is turn and not future.done():
                future.set_result(None)
                return True
        return False

    def fail(self, error: Callable[[], Exception]) -> None:
        """Raise an error in everyone who waits."""
        for _, _, future in self._heap:
            if not future.done():
                future.set_exception(error())
        self._heap.clear()
