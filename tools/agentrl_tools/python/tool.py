"""The ``python`` tool: stateful cells in a sandbox that lives as long as the trajectory."""

from __future__ import annotations

from agentrl.errors import InfrastructureError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxLimits, SandboxStatus
from agentrl.tool.base import ToolContext

_OURS = (SandboxStatus.SANDBOX_DEAD, SandboxStatus.INFRA_ERROR)
_MAX_ERROR_CHARS = 300
NO_OUTPUT = "(no output)"
"""The answer where a cell printed nothing: an empty message says less."""


class PythonTool:
    """Runs cells; what they print, and their last value, is the answer.

    The environment may hand over ``state["setup"]``: code that runs when the tool opens, for
    example to define a ``check`` function. Errors of the model's code, time-outs and memory limits
    are answers; a sandbox that fails on our side is not.

    Args:
        wall_s: seconds one cell may take.
        cpu_s: CPU seconds over all cells.
        memory_mb, max_processes, disk_mb, output_bytes: see
            :class:`~agentrl.sandbox.base.SandboxLimits`.
    """

    def __init__(
        self,
        *,
        wall_s: float = 5.0,
        cpu_s: float = 30.0,
        memory_mb: int = 256,
        max_processes: int = 32,
        disk_mb: int = 32,
        output_bytes: int = 16_384,
    ) -> None:
        self._limits = SandboxLimits(
            wall_s=wall_s,
            cpu_s=cpu_s,
            memory_mb=memory_mb,
            max_processes=max_processes,
            disk_mb=disk_mb,
            output_bytes=output_bytes,
        )
        self._sandbox: Sandbox | None = None

    async def open(self, context: ToolContext) -> None:
        """Get a fresh sandbox and run the setup code.

        Raises:
            SandboxError: there is no sandbox to be had.
            InfrastructureError: the environment's own setup code failed.
        """
        self._sandbox = await context.sandboxes.acquire(self._limits)
        setup = context.state.get("setup")
        if setup:
            result = await self._sandbox.run_code(setup)
            if result.status is not SandboxStatus.OK:
                raise InfrastructureError(
                    f"the setup code of the python tool ended with {result.status}: "
                    f"{_last_line(result.error) or result.stderr[-_MAX_ERROR_CHARS:]}"
                )

    async def call(self, code: str) -> str:
        """Run one cell.

        Raises:
            SandboxError: the sandbox died or failed on our side.
        """
        if self._sandbox is None:
            raise SandboxError("the python tool was called before it was opened")
        if "\x00" in code:
            raise ToolError("code must not hold NUL characters")
        result = await self._sandbox.run_code(code)
        if result.status in _OURS:
            raise SandboxError(f"{result.status}: {result.error or 'no reason given'}")
        return describe(result, self._limits)

    async def close(self) -> None:
        """Close the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.close()
            self._sandbox = None


def describe(result: ExecResult, limits: SandboxLimits) -> str:
    """Return a result as the model reads it: as short as it can be without losing anything."""
    note = {
        SandboxStatus.TIMEOUT: f"timeout: stopped after {limits.wall_s:g} s",
        SandboxStatus.OOM: f"out of memory: the limit is {limits.memory_mb} MB",
        SandboxStatus.PIDS_LIMIT: f"too many processes: the limit is {limits.max_processes}",
        SandboxStatus.STATE_LOST: "python was restarted: all names are lost",
    }.get(result.status, "")
    cut = f"[{result.truncated_bytes} more bytes]" if result.truncated_bytes else ""
    error = _last_line(result.error) if result.status is SandboxStatus.ERROR else ""
    parts = (result.stdout, cut, result.stderr, result.result or "", error, note)
    return "\n".join(part.rstrip("\n") for part in parts if part.strip()) or NO_OUTPUT


def _last_line(traceback: str | None) -> str:
    lines = [line for line in (traceback or "").splitlines() if line.strip()]
    return lines[-1][:_MAX_ERROR_CHARS] if lines else ""
