"""Commands of a shell whose working directory and exported variables last for the trajectory.

No shell is kept alive between calls: the sandbox runs one command at a time, and a shell that
waits would be one more thing to lose. Each call is a new shell that reads what the one before
wrote on leaving. That file lies in the sandbox, so what a model writes into it is its own affair.
"""

from __future__ import annotations

from agentrl.errors import InfrastructureError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxLimits, SandboxStatus
from agentrl.tool.base import ToolContext
from agentrl_tools.executions import describe, refuse_our_failures, shorten
from agentrl_tools.settings import refuse_below_one

_MAX_COMMAND_CHARS = 32_768
"""Well below what the kernel takes as one argument, in any encoding of it."""
_GRACE_S = 1.0
_BACKSTOP_S = 4.0
"""After the inner time limit and its grace the sandbox ends everything, python included."""
_ENDED_BY_TIMEOUT = (124, 137, 143, -9, -15)
"""With these ``timeout`` ends when time is up: its signal may reach it too."""
# In one line, so that what bash says of the command counts lines from 1.
_SHELL = "; ".join(
    (
        '_keep="${TMPDIR:-/tmp}/.bash_state"',
        '[ -f "$_keep" ] && . "$_keep"',
        '_save() { export -p && printf "cd -- %q\\n" "$PWD"; }',
        '_leave() { set +x; _save >"$_keep.new" && mv -f -- "$_keep.new" "$_keep"; }',
        "trap '_leave 2>/dev/null' EXIT",
        "exec 2>&1 </dev/null",
        'eval "$1"',
    )
)


class BashTool:
    """Runs commands; what they print, in order, and a non-zero exit code are the answer.

    The environment may hand over ``state["setup"]``: a command that runs when the tool opens.

    Args:
        wall_s: seconds one command may take; its process group is then ended.
        cpu_s, memory_mb, max_processes, disk_mb, output_bytes: what it needs of the workspace,
            see :class:`~agentrl.sandbox.base.SandboxLimits`.
        max_chars: of an answer; the middle of a longer one is left out.
    """

    def __init__(
        self,
        *,
        wall_s: float = 10.0,
        cpu_s: float = 30.0,
        memory_mb: int = 256,
        max_processes: int = 32,
        disk_mb: int = 32,
        output_bytes: int = 65_536,
        max_chars: int = 1600,
    ) -> None:
        refuse_below_one(max_chars=max_chars)
        self._max_chars = max_chars
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
        """Get the workspace and run the setup command.

        Raises:
            SandboxError: there is no sandbox to be had.
            InfrastructureError: the environment's own setup command failed.
        """
        self._sandbox = await context.workspace()
        setup = context.state.get("setup")
        if setup:
            result = await self._run(self._sandbox, setup)
            if result.status is not SandboxStatus.OK:
                raise InfrastructureError(
                    f"the setup command of the bash tool ended with {result.status}: "
                    f"{self._describe(result)[-300:]}"
                )

    async def call(self, command: str) -> str:
        """Run one command.

        Raises:
            ToolError: it holds a NUL character, or is too long to be a command.
            SandboxError: the sandbox died or failed on our side.
        """
        if self._sandbox is None:
            raise SandboxError("the bash tool was called before it was opened")
        if "\x00" in command:
            raise ToolError("a command must not hold NUL characters")
        if len(command) > _MAX_COMMAND_CHARS:
            raise ToolError(
                f"the command has {len(command)} characters, at most {_MAX_COMMAND_CHARS} are "
                "taken; write long text with edit_file or in parts"
            )
        return self._describe(await self._run(self._sandbox, command))

    async def close(self) -> None:
        """Let go of the workspace, which others may still use."""
        self._sandbox = None

    async def _run(self, sandbox: Sandbox, command: str) -> ExecResult:
        wall_s = self.workspace_limits.wall_s
        watched = ["timeout", "-k", f"{_GRACE_S:g}", f"{wall_s:g}"]
        shell = ["bash", "--noprofile", "--norc", "-c", _SHELL, "bash", command]
        backstop_s = wall_s + _GRACE_S + _BACKSTOP_S
        result = await sandbox.exec([*watched, *shell], timeout_s=backstop_s)
        refuse_our_failures(result)
        if result.exit_code in _ENDED_BY_TIMEOUT and result.duration_s >= wall_s:
            result.status = SandboxStatus.TIMEOUT
        return result

    def _describe(self, result: ExecResult) -> str:
        failed = result.status is SandboxStatus.ERROR
        last = f"[exit code {result.exit_code}]" if failed else ""
        result.stdout = shorten(result.stdout, self._max_chars)
        return describe(result, wall_s=self.workspace_limits.wall_s, last=last)
