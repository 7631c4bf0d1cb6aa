"""How the host's side of a box moves bytes: over a socket, or over what wraps one."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

_CHUNK_BYTES = 1 << 18


class Channel(Protocol):
    """A stream of bytes to and from one box, never blocking the event loop."""

    @property
    def readable(self) -> bool:
        """Whether something, or the end, can be read without waiting."""
        ...

    async def receive(self) -> bytes:
        """Return what has arrived, waiting for it; empty at the end of the stream."""
        ...

    async def send(self, data: bytes) -> None:
        """Send all of it; raises :class:`OSError` where the other side is gone."""
        ...

    def close(self) -> None:
        """Close our end. Idempotent."""
        ...


class SocketChannel:
    """A connected stream socket as a channel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    @property
    def readable(self) -> bool:
        """Peek at the socket."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def receive(self) -> bytes:
        """Read one chunk; a lost connection is an end."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._sock, _CHUNK_BYTES)
        except ConnectionError:
            return b""

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
