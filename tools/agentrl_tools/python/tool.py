"""Python cells with state, in the workspace that the tools of a trajectory share."""

from __future__ import annotations

from agentrl.errors import InfrastructureError, SandboxError, ToolError
from agentrl.sandbox.base import Sandbox, SandboxLimits, SandboxStatus
from agentrl.tool.base import ToolContext, ToolReply
from agentrl_tools.executions import MAX_ERROR_CHARS, describe, last_line, refuse_our_failures


class PythonTool:
    """Runs cells; what they print, and their last value, is the answer.

    The environment may hand over ``state["setup"]``: code that runs when the tool opens, for
    example to define a ``check`` function. Errors of the model's code, time-outs and memory limits
    are answers; a sandbox that fails on our side is not.

    Limits other than ``wall_s`` are those of the workspace: the largest that any of its tools asks.

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
        self.workspace_limits = SandboxLimits(
            wall_s=wall_s,
            cpu_s=cpu_s,
            memory_mb=memory_mb,
            max_processes=max_processes,
            disk_mb=disk_mb,
            output_bytes=output_bytes,
        )
        self._sandbox: Sandbox | None = None

    async def open(self, context: ToolContext) -> None:
        """Get the workspace and run the setup code.

        Raises:
            SandboxError: there is no sandbox to be had.
            InfrastructureError: the environment's own setup code failed.
        """
        self._sandbox = await context.workspace()
        setup = context.state.get("setup")
        if setup:
            result = await self._sandbox.run_code(setup)
            if result.status is not SandboxStatus.OK:
                raise InfrastructureError(
                    f"the setup code of the python tool ended with {result.status}: "
                    f"{last_line(result.error) or result.stderr[-MAX_ERROR_CHARS:]}"
                )

    async def call(self, code: str) -> str | ToolReply:
        """Run one cell; the reply says so where it did not come to its end.

        Raises:
            SandboxError: the sandbox died or failed on our side.
        """
        if self._sandbox is None:
            raise SandboxError("the python tool was called before it was opened")
        if "\x00" in code:
            raise ToolError("code must not hold NUL characters")
        wall_s = self.workspace_limits.wall_s
        result = await self._sandbox.run_code(code, timeout_s=wall_s)
        refuse_our_failures(result)
        failed = result.status is SandboxStatus.ERROR
        text = describe(result, wall_s=wall_s, last=last_line(result.error) if failed else "")
        ended = result.status in (SandboxStatus.OK, SandboxStatus.ERROR) and not result.state_lost
        return text if ended else ToolReply(content=text, cut_short=True)

    async def close(self) -> None:
        """Let go of the workspace, which others may still use."""
        self._sandbox = None
