"""Length-prefixed frames over a stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("!Q")


def frame(payload: bytes) -> bytes:
    """Return ``payload`` with its length in front (8 bytes, big-endian)."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream, fed in pieces of any size, into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add ``data`` and yield each payload that is complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload
