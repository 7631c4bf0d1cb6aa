"""Settings of tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.tool.breaker import BreakerConfig


@dataclass(slots=True, kw_only=True)
class ToolsConfig:
    """Which tools beside those that the environment names, and what they may import."""

    specs: dict[str, str] = field(default_factory=dict)
    """Tool name to the path of a YAML spec: replaces the environment's tool of that name."""
    allow_import: list[str] = field(default_factory=list)
    """Module prefixes that a spec outside an installed pack may name under ``python:``."""
    allow_command: list[str] = field(default_factory=list)
    """Programs that a spec may start under ``mcp.command``, beside installed MCP servers and those
    in its own folder."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    """When a tool that fails on our side is left alone, and when the run gives up on it."""
