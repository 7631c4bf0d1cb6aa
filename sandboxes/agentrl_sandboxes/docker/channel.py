"""The channel of a box in a container: its standard streams, as an attached client gets them."""

from __future__ import annotations

import contextlib
import socket
import struct

from agentrl_sandboxes.supervised.channel import SocketChannel

_FRAME = struct.Struct(">BxxxI")
_STDOUT = 1
_STDERR_TAIL_BYTES = 4096


class AttachedChannel:
    """Takes the engine's frames apart: standard output is the channel, standard error is kept.

    A frame is passed on as it arrives, so that its length bounds nothing that is held here.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._plain = sock
        self._socket = SocketChannel(sock)
        self._header = bytearray()
        self._stream = 0
        self._missing = 0
        self._stderr = b""

    @property
    def readable(self) -> bool:
        """Whether something, or the end, can be read without waiting."""
        return self._socket.readable

    def last_words(self) -> str:
        """The end of what the supervisor wrote to standard error."""
        return self._stderr.decode("utf-8", "replace").strip() or "it said nothing"

    async def receive(self) -> bytes:
        """Return the next bytes of standard output; empty at the end of the stream."""
        while True:
            chunk = await self._socket.receive()
            if not chunk:
                return b""
            payload = self.take_apart(chunk)
            if payload:
                return payload

    async def send(self, data: bytes) -> None:
        """Send to standard input, which has no frames."""
        await self._socket.send(data)

    def hang_up(self) -> None:
        """End the container's standard input: its supervisor ends everything, and itself."""
        with contextlib.suppress(OSError):  # the connection has ended before
            self._plain.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close our end, which ends the container's standard input, and so the box."""
        self._socket.close()

    def take_apart(self, chunk: bytes) -> bytes:
        """Return what of a chunk belongs to standard output."""
        if not self._header and self._missing == 0 and len(chunk) >= _FRAME.size:
            stream, length = _FRAME.unpack_from(chunk)
            if stream == _STDOUT and length == len(chunk) - _FRAME.size:
                return chunk[_FRAME.size :]  # one whole frame, as nearly every answer is
        payload, position = bytearray(), 0
        while position < len(chunk):
            if self._missing == 0:
                needed = _FRAME.size - len(self._header)
                self._header += chunk[position : position + needed]
                position += needed
                if len(self._header) == _FRAME.size:
                    self._stream, self._missing = _FRAME.unpack(self._header)
                    self._header.clear()
                continue
            part = chunk[position : position + self._missing]
            position += len(part)
            self._missing -= len(part)
            if self._stream == _STDOUT:
                payload += part
            else:
                self._stderr = (self._stderr + part)[-_STDERR_TAIL_BYTES:]
        return bytes(payload)
