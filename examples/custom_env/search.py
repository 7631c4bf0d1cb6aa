"""The ``search`` tool: one instance an episode, told where the thing is when it opens."""

from __future__ import annotations

from agentrl.tool.base import ToolContext


class Search:
    """Says whether the thing is in a room."""

    def open(self, context: ToolContext) -> None:
        """Take what ``HideAndSeek.tool_state`` hands over."""
        self._place = context.state["place"]

    def call(self, room: str) -> str:
        """Answer one call; what it returns is what the model reads."""
        return "found" if room == self._place else "nothing"

    def close(self) -> None:
        """Nothing to free."""
