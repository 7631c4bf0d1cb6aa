"""Tool-call parsers: from what the model wrote to calls."""

from __future__ import annotations

from agentrl.registry import Registry
from agentrl.tool.parsers.base import ParsedTurn, ToolCallParser

parser_registry: Registry[type[ToolCallParser]] = Registry(
    "tool-call parser",
    "agentrl.parsers",
    {"hermes": "agentrl.tool.parsers.hermes:HermesParser"},
)


def make_parser(name: str) -> ToolCallParser:
    """Return the parser registered as ``name``.

    Raises:
        RegistryError: there is none; close matches are listed.
    """
    return parser_registry.get(name)()


__all__ = ["ParsedTurn", "ToolCallParser", "make_parser", "parser_registry"]
