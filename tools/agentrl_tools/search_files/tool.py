"""Searches the workspace, inside the sandbox: a pattern may take for ever, a tree be hostile."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.errors import SandboxError, ToolError
from agentrl.sandbox.base import Sandbox, SandboxLimits
from agentrl.tool.base import ToolContext
from agentrl_tools.executions import describe, refuse_our_failures
from agentrl_tools.paths import check_path
from agentrl_tools.settings import refuse_below_one, refuse_no_time

_PROGRAM = Path(__file__).with_name("program.py")
_MAX_PATTERN_CHARS = 500
_MAX_ANSWER_BYTES = 65_536
_BACKSTOP_S = 5.0
"""After the program's own time limit the sandbox ends everything, python included."""


class SearchFiles:
    """Looks for lines or file names.

    Args:
        wall_s: seconds one search may take.
        max_results: lines or names of one answer.
        max_line_chars: of one line; the rest of it is cut.
        max_file_bytes: larger files are left out, and counted.
        max_files: files looked at.
    """

    def __init__(
        self,
        *,
        wall_s: float = 5.0,
        max_results: int = 50,
        max_line_chars: int = 200,
        max_file_bytes: int = 1 << 20,
        max_files: int = 5000,
    ) -> None:
        counts = {
            "max_results": max_results,
            "max_line_chars": max_line_chars,
            "max_file_bytes": max_file_bytes,
            "max_files": max_files,
        }
        refuse_below_one(**counts)
        refuse_no_time(wall_s=wall_s)
        self.workspace_limits = SandboxLimits()
        self._wall_s = wall_s
        self._limits = {"wall_s": wall_s, **counts}
        self._source = _PROGRAM.read_text()
        self._sandbox: Sandbox | None = None

    async def open(self, context: ToolContext) -> None:
        """Get the workspace.

        Raises:
            SandboxError: there is no sandbox to be had.
        """
        self._sandbox = await context.workspace()

    async def call(
        self, pattern: str | None = None, glob: str | None = None, literal: bool = False
    ) -> str:
        """Return what matches, sorted, and what was left out.

        Raises:
            ToolError: no valid pattern or glob, or a search that takes too long.
        """
        if self._sandbox is None:
            raise SandboxError("search_files was called before it was opened")
        if pattern is not None and len(pattern) > _MAX_PATTERN_CHARS:
            raise ToolError(f"the pattern has {len(pattern)} characters, at most 500 are taken")
        inside = None if glob is None else check_path(glob)
        request = {**self._limits, "pattern": pattern, "glob": inside, "literal": literal}
        payload = json.dumps(request).encode()
        result = await self._sandbox.run_private(
            self._source, payload, timeout_s=self._wall_s + _BACKSTOP_S
        )
        refuse_our_failures(result)
        kind, text = result.private[:1], result.private[1:_MAX_ANSWER_BYTES]
        if kind not in (b"+", b"-"):
            raise ToolError(f"the search failed: {describe(result, wall_s=self._wall_s)[-300:]}")
        if kind == b"-":
            raise ToolError(text.decode("utf-8", "replace"))
        return text.decode("utf-8", "replace")

    async def close(self) -> None:
        """Let go of the workspace, which others may still use."""
        self._sandbox = None
