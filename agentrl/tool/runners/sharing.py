"""Sessions with a server: one for all tools of a trajectory, or one for a whole process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Session(Protocol):
    """Something that is opened for a trajectory and can be lost."""

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be asked of it any more."""
        ...

    async def close(self) -> None:
        """End it. Never raises; bounded in time."""
        ...


S = TypeVar("S", bound=Session)


@dataclass(slots=True)
class _Slot(Generic[S]):
    num_holders: int = 0
    session: S | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class SharedSessions(Generic[S]):
    """Opens a session for the first who asks for a key, and closes it after the last.

    Used from one event loop.

    Args:
        connect: opens a session.
        keep: never close; a session that was lost is replaced for whoever asks next.
    """

    def __init__(self, connect: Callable[[], Awaitable[S]], *, keep: bool = False) -> None:
        self._connect = connect
        self._keep = keep
        self._slots: dict[str, _Slot[S]] = {}

    async def acquire(self, key: str) -> S:
        """Return the session of a key. Each success is followed by one :meth:`release`."""
        slot = self._slots.setdefault(key, _Slot())
        slot.num_holders += 1
        try:
            async with slot.opening:
                if slot.session is not None and slot.session.is_lost and self._keep:
                    lost, slot.session = slot.session, None
                    await lost.close()
                if slot.session is None:
                    slot.session = await self._connect()
                return slot.session
        except BaseException:
            await self._let_go(key, slot)
            raise

    async def release(self, key: str) -> None:
        """Give a session back."""
        slot = self._slots.get(key)
        if slot is not None:
            await self._let_go(key, slot)

    async def _let_go(self, key: str, slot: _Slot[S]) -> None:
        slot.num_holders -= 1
        if slot.num_holders or (self._keep and slot.session is not None):
            return
        if self._slots.get(key) is slot:
            del self._slots[key]
        session, slot.session = slot.session, None
        if session is not None:
            await session.close()
