"""Sandboxes that isolate nothing, for tests of what uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.errors import SandboxError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus


class FakeSandbox:
    """Answers every execution with what ``answer`` says."""

    def __init__(self, answer: Callable[[str], ExecResult], limits: SandboxLimits | None) -> None:
        self.limits = limits
        self.cells: list[str] = []
        self.closed = False
        self._answer = answer

    async def run_code(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Note the cell and answer."""
        if self.closed:
            raise SandboxError("the sandbox is closed")
        self.cells.append(code)
        return self._answer(code)

    async def run_private(
        self, source: str, payload: bytes, *, timeout_s: float | None = None
    ) -> ExecResult:
        """Answer as for a cell."""
        return await self.run_code(source)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
    ) -> ExecResult:
        """Answer as for a cell."""
        return await self.run_code(" ".join(argv))

    async def read(self, path: str) -> bytes:
        """Return nothing."""
        return b""

    async def write(self, path: str, data: bytes) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


class FakeSandboxes:
    """A provider of :class:`FakeSandbox`; ``opened`` lists every one given out.

    Args:
        answer: result of an execution, given the code; by default an empty success.
        fails: raise ``SandboxError`` in place of giving one out.
    """

    def __init__(
        self, answer: Callable[[str], ExecResult] | None = None, *, fails: bool = False
    ) -> None:
        self.opened: list[FakeSandbox] = []
        self._answer = answer or (lambda code: ExecResult(status=SandboxStatus.OK))
        self._fails = fails

    async def acquire(self, limits: SandboxLimits | None = None) -> FakeSandbox:
        """Give out a sandbox."""
        if self._fails:
            raise SandboxError("no sandbox could be had")
        sandbox = FakeSandbox(self._answer, limits)
        self.opened.append(sandbox)
        return sandbox
