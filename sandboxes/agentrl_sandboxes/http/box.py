"""One sandbox of a sandbox server, as its client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.errors import ConfigError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, SandboxLimits
from agentrl.sandbox.serving import wire
from agentrl_sandboxes.http.connection import Connection, UnknownHere

_SLACK_S = 20.0
"""How long after a call's own deadline the server may answer: supervisor and transfer included."""
_FILE_S = 60.0
_CLOSE_S = 15.0


class HttpSandbox:
    """Calls go to the server one after another, as in any sandbox; errors are typed alike.

    A call that is cancelled, or whose server is lost, ends the sandbox: what it did meanwhile
    nobody knows.
    """

    def __init__(
        self,
        node: Connection,
        box_id: str,
        limits: SandboxLimits,
        *,
        forget: Callable[[], object],
    ) -> None:
        self.node = node
        """The server that holds it."""
        self._id = box_id
        self._limits = limits
        self._forget = forget
        self._turn = asyncio.Lock()
        self._dead: str | None = None
        self._closing: asyncio.Task[None] | None = None

    async def run_code(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a Python cell; see :class:`agentrl.sandbox.base.Sandbox`."""
        return await self._execute("run_code", {}, _encode(code), timeout_s)

    async def run_private(
        self, source: str, payload: bytes, *, timeout_s: float | None = None
    ) -> ExecResult:
        """Run a program whose replies only the host reads; see the protocol."""
        return await self._execute("run_private", {"source": source}, payload, timeout_s)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
    ) -> ExecResult:
        """Run a command in the work directory."""
        words = list(argv)
        if not words or any(not isinstance(word, str) or "\0" in word for word in words):
            raise ToolError(f"a command needs words without NUL characters, got {argv!r:.200}")
        return await self._execute("exec", {"argv": words}, stdin, timeout_s)

    async def read(self, path: str) -> bytes:
        """Read a file; raises :class:`ToolError` if there is no such regular file in the box."""
        return await self._transfer("read", path, b"")

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; raises :class:`ToolError` if the path leads out or the disk is full."""
        most = self._limits.disk_mb << 20
        if len(data) > most:
            raise ToolError(f"{path!r} would have {len(data)} bytes, and the disk holds {most}")
        await self._transfer("write", path, data)

    async def close(self) -> None:
        """Close it at the server. Idempotent.

        Raises:
            SandboxError: the server could not be told; its lease then ends it.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._dead = self._dead or "the sandbox is closed"
        self._forget()
        await self.node.ask("DELETE", f"/v1/sandboxes/{self._id}", timeout_s=_CLOSE_S)

    async def _execute(
        self, operation: str, request: dict[str, Any], body: bytes, timeout_s: float | None
    ) -> ExecResult:
        seconds = self._limits.wall_s if timeout_s is None else timeout_s
        if not 0 < seconds < 1e6:
            raise SandboxError(f"timeout_s must be a positive number of seconds, got {seconds}")
        request = {**request, "timeout_s": seconds}
        answer = await self._ask(operation, request, body, seconds + _SLACK_S)
        try:
            return wire.unpack_result(answer)
        except wire.WireError as error:
            raise self._garbage(error) from None

    async def _transfer(self, operation: str, path: str, body: bytes) -> bytes:
        if not isinstance(path, str) or "\0" in path or len(path) > 4096:
            raise ToolError(f"not a usable path: {path!r:.200}")
        answer = await self._ask(operation, {"path": path}, body, _FILE_S)
        try:
            return wire.unpack(answer)[1]
        except wire.WireError as error:
            raise self._garbage(error) from None

    async def _ask(
        self, operation: str, request: dict[str, Any], body: bytes, deadline_s: float
    ) -> bytes:
        async with self._turn:
            if self._dead is not None:
                raise SandboxError(f"the sandbox cannot be used any more: {self._dead}")
            answered = False
            try:
                answer = await self.node.ask(
                    "POST",
                    f"/v1/sandboxes/{self._id}/{operation}",
                    wire.pack(request, body),
                    timeout_s=deadline_s,
                    media_type=wire.MEDIA_TYPE,
                )
                answered = True
                return answer
            except (ToolError, ConfigError):
                answered = True
                raise
            except UnknownHere as error:
                self._dead = str(error)
                raise
            finally:
                if not answered:
                    self._dead = self._dead or "an earlier call did not finish"

    def _garbage(self, error: wire.WireError) -> SandboxError:
        self._dead = "the server sent garbage"
        return SandboxError(f"the sandbox server at {self.node.url} sent garbage: {error}")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
