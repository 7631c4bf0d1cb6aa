"""The framing that the host, the supervisor and the interpreter share.

A frame is two big-endian 32-bit lengths, a JSON object, and raw bytes. Whatever comes from an
untrusted process is bounded in length before it is read.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Protocol

PREFIX = struct.Struct("!II")
NUMBER = struct.Struct("!I")
"""The number of a request, in its body's place in the report that answers it."""
GOODBYE = b"\xff\xff\xff\xffBYE!"
"""The zygote writes this as a box's last bytes once every process of the box is dead."""


class Stream(Protocol):
    """What a supervisor speaks over: a connected socket, or what acts like one."""

    def fileno(self) -> int:
        """The descriptor to poll for the host's words and its going."""
        ...

    def recv(self, bufsize: int, /) -> bytes:
        """Read what is there, waiting for it; empty at the end."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send all of it."""
        ...


class FrameError(Exception):
    """The other side sent something that is no frame, or one above the limit."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    head = json.dumps(header).encode("ascii")
    return PREFIX.pack(len(head), len(body)) + head + body


def parse_header(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object of a frame; raises :class:`FrameError` on anything else."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"unreadable frame header: {error}") from None
    if not isinstance(header, dict):
        raise FrameError("a frame header must be a JSON object")
    return header


def receive(sock: Stream, max_bytes: int) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame from a blocking socket; None at the end of the stream."""
    prefix = _receive_exactly(sock, PREFIX.size)
    if prefix is None:
        return None
    head_bytes, body_bytes = PREFIX.unpack(prefix)
    if head_bytes + body_bytes > max_bytes:
        raise FrameError(f"frame of {head_bytes + body_bytes} bytes, limit {max_bytes}")
    rest = _receive_exactly(sock, head_bytes + body_bytes)
    if rest is None:
        return None
    return parse_header(bytes(rest[:head_bytes])), bytes(rest[head_bytes:])


def _receive_exactly(sock: Stream, count: int) -> bytearray | None:
    data = bytearray()
    while len(data) < count:
        chunk = sock.recv(min(count - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return data
