"""The idlest replica, found without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from agentrl.rollout.serving.supervisor import Replica, State

_SLACK = 64


class IdleOrder:
    """The replicas that serve, by number of requests, the lowest number among equals.

    A heap of what was true when it was noted: entries that no longer are, are skipped when they
    come up, and thrown away together when they outnumber the replicas. A request costs the
    logarithm of the number of replicas.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._heap: list[tuple[int, int]] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Look at every replica: their states may have changed."""
        self._heap = [
            (replica.requests, replica.number)
            for replica in self._replicas
            if replica.state is State.SERVING
        ]
        heapq.heapify(self._heap)

    def note(self, replica: Replica) -> None:
        """Say that the number of a replica's requests has changed."""
        heapq.heappush(self._heap, (replica.requests, replica.number))
        if len(self._heap) > 4 * len(self._replicas) + _SLACK:
            self.rebuild()

    def idlest(self) -> Replica | None:
        """Return the replica with the fewest requests; None where none serves."""
        while self._heap:
            requests, number = self._heap[0]
            replica = self._replicas[number]
            if replica.state is State.SERVING and replica.requests == requests:
                return replica
            heapq.heappop(self._heap)
        return None
