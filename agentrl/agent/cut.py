"""Ends episodes early that nobody waits for any more, with what they have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Cut:
    """A switch that the episodes of a group share: once set, they end at once.

    What an episode waits for, be it the engine, a tool or its environment, is cancelled as at its
    deadline. Nothing is graded.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._scopes: set[asyncio.Timeout] = set()

    def set(self) -> None:
        """End the episodes that are being played. Call it on their event loop. Idempotent."""
        self.is_set = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(now)
        self._scopes.clear()

    @contextmanager
    def ends(self, scope: asyncio.Timeout) -> Iterator[None]:
        """Let ``scope``, which has been entered, expire when the switch is set, or now if it is."""
        self._scopes.add(scope)
        if self.is_set:
            self.set()
        try:
            yield
        finally:
            self._scopes.discard(scope)
