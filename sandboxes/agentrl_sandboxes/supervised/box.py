"""The host's side of one box: a client of its supervisor's channel.

The host never resolves a path, opens a file or parses a program of the box. It sends requests,
reads frames of bounded length, and holds every wait to a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from agentrl.errors import SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus
from agentrl_sandboxes.supervised.channel import Channel
from agentrl_sandboxes.supervised.inside import wire
from agentrl_sandboxes.supervised.outcome import interpret

_SLACK_S = 5.0
"""How long after its own deadline a supervisor may answer, on a loaded machine."""
_CLOSE_S = 10.0
_FILE_S = 10.0
_MAX_ANSWER_BYTES = 128 << 20


class ChannelClosed(Exception):
    """The box's channel ended; `witnessed` if the zygote saw the box die."""

    def __init__(self, witnessed: bool) -> None:
        super().__init__(witnessed)
        self.witnessed = witnessed


class BoxDied(Exception):
    """The box ended by what ran in it."""

    def __init__(self, status: SandboxStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Autopsy(Protocol):
    """Finds out why a box's channel ended."""

    async def __call__(self) -> tuple[SandboxStatus, str]:
        """Return the status and the reason of a death that the box brought on itself.

        Raises:
            SandboxError: it was no fault of the box.
        """
        ...


class SupervisedSandbox:
    """One box with its own interpreter, work directory and process tree.

    A time-out first interrupts the cell, which keeps its names; a cell that does not react is
    killed with everything it started, and `ExecResult.state_lost` says that names are gone. The
    box stays usable either way: the next call finds a fresh interpreter.
    """

    def __init__(
        self,
        channel: Channel,
        limits: SandboxLimits,
        *,
        kill: Callable[[], None],
        release: Callable[[], Awaitable[None]],
        has_witness: bool,
        autopsy: Autopsy | None = None,
    ) -> None:
        self._channel = channel
        self._limits = limits
        self._kill = kill
        self._release = release
        self._has_witness = has_witness
        self._autopsy = autopsy
        self._buffer = bytearray()
        self._turn = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._dead: str | None = None

    @property
    def ended(self) -> bool:
        """Whether an idle box has died or been closed; peeks at the channel without waiting."""
        # It says nothing unasked but its goodbye.
        return self._dead is not None or self._channel.readable

    async def hello(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the box is set up; return what it read back about itself.

        Raises:
            SandboxError: it could not be set up in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                header, _ = await self._receive()
        except TimeoutError:
            raise SandboxError(f"a sandbox was not ready within {timeout_s:g} s") from None
        except (ChannelClosed, wire.FrameError):
            raise SandboxError("a sandbox died while it was being set up") from None
        if "error" in header:
            raise SandboxError(f"a sandbox could not be set up: {header['error']}")
        return header["facts"]

    async def run_code(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a Python cell; see :class:`agentrl.sandbox.base.Sandbox`."""
        return await self._execute({"op": "cell"}, _encode(code), timeout_s)

    async def run_private(
        self, source: str, payload: bytes, *, timeout_s: float | None = None
    ) -> ExecResult:
        """Run a program whose replies only the host reads; see the protocol."""
        request = {"op": "private", "payload_bytes": len(payload)}
        return await self._execute(request, payload + _encode(source), timeout_s)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
    ) -> ExecResult:
        """Run a command in the work directory; a time-out kills every process of the box."""
        words = list(argv)
        if not words or any(not isinstance(word, str) or "\0" in word for word in words):
            raise ToolError(f"a command needs words without NUL characters, got {argv!r:.200}")
        return await self._execute({"op": "exec", "argv": words}, stdin, timeout_s)

    async def read(self, path: str) -> bytes:
        """Read a file; raises :class:`ToolError` if there is no such regular file in the box."""
        return await self._transfer({"op": "read", "path": path}, b"")

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; raises :class:`ToolError` if the path leads out or the disk is full."""
        if len(data) > self._limits.disk_mb << 20:
            raise ToolError(
                f"{path!r:.200}: {len(data)} bytes do not fit a disk of {self._limits.disk_mb} MB"
            )
        await self._transfer({"op": "write", "path": path}, data)

    async def close(self) -> None:
        """Kill every process of the box and wait until none is left. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._dead = self._dead or "the sandbox is closed"
        self._kill()
        try:
            # A call that still runs reads the end itself: a channel has one reader.
            async with asyncio.timeout(_CLOSE_S), self._turn:
                while await self._channel.receive():
                    pass
        except (TimeoutError, OSError):
            pass  # the backend's own close ends whatever is left
        finally:
            self._channel.close()
            await self._release()

    async def _execute(
        self, request: dict[str, Any], body: bytes, timeout_s: float | None
    ) -> ExecResult:
        seconds = self._limits.wall_s if timeout_s is None else timeout_s
        if not 0 < seconds < 1e6:
            raise SandboxError(f"timeout_s must be a positive number of seconds, got {seconds}")
        try:
            answer = await self._ask({**request, "timeout_s": seconds}, body, seconds + _SLACK_S)
        except TimeoutError:
            reason = f"Time limit of {seconds:g} s reached, and the sandbox had to be killed."
            return self._died(SandboxStatus.TIMEOUT, reason)
        except BoxDied as death:
            return self._died(death.status, death.reason)
        return interpret(*answer, self._limits, seconds)

    def _died(self, status: SandboxStatus, reason: str) -> ExecResult:
        self._dead = reason
        self._kill()
        return ExecResult(status=status, error=reason, state_lost=True)

    async def _transfer(self, request: dict[str, Any], body: bytes) -> bytes:
        path = request["path"]
        if not isinstance(path, str) or "\0" in path or len(path) > 4096:
            raise ToolError(f"not a usable path: {path!r:.200}")
        try:
            header, data = await self._ask(request, body, _FILE_S)
        except (TimeoutError, BoxDied):
            self._died(SandboxStatus.SANDBOX_DEAD, "The sandbox died during a file transfer.")
            raise SandboxError(f"the sandbox died while it transferred {path!r}") from None
        if "refused" in header:
            raise ToolError(str(header["refused"]))
        return data

    async def _ask(
        self, request: dict[str, Any], body: bytes, deadline_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return its answer; a failure in between ends the box."""
        async with self._turn:
            if self._dead is not None:
                raise SandboxError(f"the sandbox cannot be used any more: {self._dead}")
            finished = False
            try:
                async with asyncio.timeout(deadline_s):
                    with contextlib.suppress(OSError):  # the end of the stream says why
                        await self._channel.send(wire.pack(request, body))
                    answer = await self._receive()
                finished = True
                return answer
            except wire.FrameError as error:
                raise SandboxError(f"the sandbox sent garbage: {error}") from None
            except ChannelClosed as closed:  # looked into before the kill removes the evidence
                raise await self._explain(closed) from None
            finally:
                if not finished:  # also when cancelled: the stream is out of step from here on
                    self._dead = self._dead or "an earlier call did not finish"
                    self._kill()

    async def _explain(self, closed: ChannelClosed) -> BoxDied:
        """Return how the box died; raises :class:`SandboxError` if that was no fault of its."""
        if self._closing is not None:
            raise SandboxError("the sandbox was closed while a call ran in it")
        if not closed.witnessed:
            raise SandboxError("the process that holds all sandboxes has died")
        if self._autopsy is not None:
            return BoxDied(*await self._autopsy())
        return BoxDied(SandboxStatus.SANDBOX_DEAD, "The sandbox died during this call.")

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        await self._fill(wire.PREFIX.size)
        head, body = wire.PREFIX.unpack_from(self._buffer)
        end = wire.PREFIX.size + head + body
        if end > _MAX_ANSWER_BYTES:
            if self._buffer.endswith(wire.GOODBYE):
                raise ChannelClosed(True)
            raise wire.FrameError(f"answer of {end} bytes")
        await self._fill(end)
        header = wire.parse_header(bytes(self._buffer[wire.PREFIX.size : end - body]))
        data = bytes(self._buffer[end - body : end])
        del self._buffer[:end]
        return header, data

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            chunk = await self._channel.receive()
            if not chunk:
                seen = not self._has_witness or self._buffer.endswith(wire.GOODBYE)
                raise ChannelClosed(seen)
            self._buffer += chunk


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
