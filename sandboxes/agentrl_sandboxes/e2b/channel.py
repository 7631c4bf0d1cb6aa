"""The channel of a box in an E2B sandbox: the standard streams of one process there."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

_CHUNK_BYTES = 1 << 20
_STDERR_TAIL = 4096


class ProcessChannel:
    """Standard input takes bytes as they are; standard output comes as lines of base64.

    The SDK hands output on as text, with what is no UTF-8 replaced, so bytes have to be wrapped.
    """

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._line = ""
        self._stderr = ""
        self._sandbox: AsyncSandbox | None = None
        self._pid = 0
        self._watch: asyncio.Task[None] | None = None
        self._ended = False

    def attach(self, sandbox: AsyncSandbox, handle: AsyncCommandHandle[None]) -> None:
        """Bind to the process that was started with `on_stdout` and `on_stderr`."""
        self._sandbox, self._pid = sandbox, handle.pid
        self._watch = asyncio.create_task(self._until_end(handle))

    def on_stdout(self, text: str) -> None:
        """Take a piece of output apart into lines."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            try:
                data = base64.b64decode(line, validate=True)
            except binascii.Error:
                data = b""  # it is not our relay that speaks: an end, as any garbage is
                self._stderr = (self._stderr + line)[-_STDERR_TAIL:]
            self._arrived.put_nowait(data)

    def on_stderr(self, text: str) -> None:
        """Keep the end of what it complains about."""
        self._stderr = (self._stderr + text)[-_STDERR_TAIL:]

    def last_words(self) -> str:
        """The end of what came on standard error."""
        return self._stderr.strip() or "it said nothing"

    @property
    def readable(self) -> bool:
        """Whether something, or the end, can be read without waiting."""
        return self._ended or not self._arrived.empty()

    async def receive(self) -> bytes:
        """Return what has arrived; empty at the end of the stream."""
        if self._ended and self._arrived.empty():
            return b""
        data = await self._arrived.get()
        self._ended = self._ended or not data
        return data

    async def send(self, data: bytes) -> None:
        """Send all of it; raises :class:`OSError` where the other side is gone."""
        if self._sandbox is None or self._ended:
            raise ConnectionError("the process in the E2B sandbox has ended")
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            try:
                await self._sandbox.commands.send_stdin(self._pid, chunk)
            except Exception as error:  # the SDK's errors have no common base
                raise ConnectionError(f"E2B: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stop listening. The sandbox itself is ended by its owner."""
        self._ended = True
        self._arrived.put_nowait(b"")
        if self._watch is not None:
            self._watch.cancel()

    async def _until_end(self, handle: AsyncCommandHandle[None]) -> None:
        """Mark the end of the stream, in whatever way it ends."""
        try:
            await handle.wait()
        except Exception as error:  # an exit code, or the connection: the autopsy tells which
            self._stderr = self._stderr or str(error)[-_STDERR_TAIL:]
        finally:
            self._arrived.put_nowait(b"")
            await handle.disconnect()
