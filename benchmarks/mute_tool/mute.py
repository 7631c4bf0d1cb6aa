"""A tool that takes calls and answers nothing."""

from __future__ import annotations

from agentrl.tool.base import ToolContext


class MutePython:
    async def open(self, context: ToolContext) -> None:
        """Nothing runs, so nothing is opened."""

    async def call(self, code: str) -> str:
        return "(no output)"

    async def close(self) -> None:
        """Nothing was opened."""
