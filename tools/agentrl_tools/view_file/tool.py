"""Shows numbered lines of a file, read through the sandbox."""

from __future__ import annotations

from agentrl.errors import SandboxError, ToolError
from agentrl.sandbox.base import Sandbox, SandboxLimits
from agentrl.tool.base import ToolContext
from agentrl_tools.paths import check_file
from agentrl_tools.settings import refuse_below_one
from agentrl_tools.text_files import lines_of, number_lines, read_text


class ViewFile:
    """Shows a window of a text file; says how much of it there is.

    Args:
        max_lines: lines of one answer.
        max_line_chars: of one line; the rest of it is cut.
    """

    def __init__(self, *, max_lines: int = 100, max_line_chars: int = 400) -> None:
        refuse_below_one(max_lines=max_lines, max_line_chars=max_line_chars)
        self.workspace_limits = SandboxLimits()
        self._max_lines = max_lines
        self._max_line_chars = max_line_chars
        self._sandbox: Sandbox | None = None

    async def open(self, context: ToolContext) -> None:
        """Get the workspace.

        Raises:
            SandboxError: there is no sandbox to be had.
        """
        self._sandbox = await context.workspace()

    async def call(self, path: str, first_line: int = 1, last_line: int | None = None) -> str:
        """Return lines ``first_line`` to ``last_line``, counted from 1, both included.

        Raises:
            ToolError: no such text file, or no such lines.
        """
        if self._sandbox is None:
            raise SandboxError("view_file was called before it was opened")
        inside = check_file(path)
        lines = lines_of(await read_text(self._sandbox, inside))
        if last_line is not None and last_line < first_line:
            raise ToolError(f"last_line={last_line} comes before first_line={first_line}")
        if not lines:
            return "(empty file)"
        if first_line > len(lines):
            raise ToolError(f"{inside} has only {len(lines)} lines, first_line={first_line}")
        most = first_line + self._max_lines - 1
        last = min(len(lines), most if last_line is None else min(last_line, most))
        shown = number_lines(lines, first_line, last, max_chars=self._max_line_chars)
        if first_line == 1 and last == len(lines):
            return shown
        return f"{shown}\n[lines {first_line}-{last} of {len(lines)}]"

    async def close(self) -> None:
        """Let go of the workspace, which others may still use."""
        self._sandbox = None
