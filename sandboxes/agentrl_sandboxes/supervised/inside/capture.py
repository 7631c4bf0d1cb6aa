"""Bounded, non-blocking reading and writing of the pipes of an untrusted process."""

from __future__ import annotations

import os
import socket

from . import wire

_CHUNK = 65536


class Capture:
    """The read end of a pipe: keeps the first bytes, counts the rest, never grows past that."""

    def __init__(self, fd: int, keep_bytes: int) -> None:
        self.fd = fd
        self.open = True
        self._keep = keep_bytes
        self.kept = bytearray()
        self.total = 0
        os.set_blocking(fd, False)

    def read_some(self) -> None:
        """Take what one read gives."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.open = False
            return
        self.total += len(chunk)
        room = self._keep - len(self.kept)
        if room > 0:
            self.kept += chunk[:room]

    def drain(self, flood_bytes: int) -> None:
        """Take what lies in the pipe now, but no more than a flood."""
        before = -1
        while self.open and before != self.total and self.total <= flood_bytes:
            before = self.total
            self.read_some()

    def take(self) -> tuple[bytes, int]:
        """Return (kept bytes, number of bytes cut away) and start anew."""
        kept, cut = bytes(self.kept), self.total - len(self.kept)
        self.kept, self.total = bytearray(), 0
        return kept, cut


class Feeder:
    """Bytes on their way into a pipe or socket whose reader may never read."""

    def __init__(self, fd: int, data: bytes, *, close_when_done: bool) -> None:
        self.fd = fd
        self._rest = memoryview(data)
        self._close_when_done = close_when_done
        os.set_blocking(fd, False)
        self.write_some()

    @property
    def pending(self) -> bool:
        """Whether there is something left to write."""
        return self.fd >= 0 and len(self._rest) > 0

    def write_some(self) -> None:
        """Write what the other side has room for."""
        try:
            while self._rest:
                self._rest = self._rest[os.write(self.fd, self._rest[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            self._rest = self._rest[:0]  # the reader is gone; its exit is noticed elsewhere
        self.finish()

    def finish(self) -> None:
        """Drop the rest, and close if this end is ours alone."""
        self._rest = self._rest[:0]
        if self._close_when_done and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Reports:
    """Frames from an untrusted process, read without ever waiting for it.

    A frame without header is private data; one with a header is the final report, which is
    passed on unread: the host parses it, which is why its length has a bound of its own. Its body
    is the number of the request, so that a report sent twice or late is not taken for the next.
    """

    def __init__(self, sock: socket.socket, max_report_bytes: int, max_private_bytes: int) -> None:
        self.sock = sock
        self.open = True
        self._max_report = max_report_bytes
        self._max_private = max_private_bytes
        self._buffer = bytearray()
        self.private = bytearray()
        self.report: bytes | None = None
        self.overflow = False
        self.out_of_turn = False
        self.expected = 0
        self.unsent = memoryview(b"")
        sock.setblocking(False)

    def transfer(self) -> None:
        """Send what the other side has room for, then parse what one receive gives."""
        try:
            if self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent[:_CHUNK]) :]
        except OSError:
            pass  # no room, or the reader is gone; its exit is noticed elsewhere
        try:
            chunk = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.open = False
            return
        self._buffer += chunk
        while len(self._buffer) >= wire.PREFIX.size:
            head, body = wire.PREFIX.unpack_from(self._buffer)
            end = wire.PREFIX.size + head + body
            if head > self._max_report or body + len(self.private) > self._max_private:
                self.overflow = True
                return
            if len(self._buffer) < end:
                return
            if head and self._buffer[end - body : end] != wire.NUMBER.pack(self.expected):
                self.out_of_turn = True
                return
            if head and self.report is None:  # a second one of the same number is no news
                self.report = bytes(self._buffer[wire.PREFIX.size : wire.PREFIX.size + head])
            elif not head:
                self.private += self._buffer[wire.PREFIX.size : end]
            del self._buffer[:end]

    def take(self) -> tuple[bytes, bytes]:
        """Return (report, private data) and start anew."""
        report, private = self.report or b"", bytes(self.private)
        self.report, self.private = None, bytearray()
        return report, private
