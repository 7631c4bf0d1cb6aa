"""The parser of turns that hold no calls."""

from __future__ import annotations

from agentrl.tool.parsers.base import NO_CONTEXT, ParsedTurn, TurnContext


class NoCallsParser:
    """Takes every turn for text."""

    stop_tokens: tuple[str, ...] = ()

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Return the text as it is."""
        return ParsedTurn(content=text, tool_calls=())
