"""agentrl trains tool-using language-model agents with reinforcement learning, over many turns.

The public names below load on first use, so that ``import agentrl`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agentrl.env.base import AsyncEnv, Demonstration, Env, Episode, ScriptedTurn
    from agentrl.env.registry import make_env, register_env
    from agentrl.errors import AgentRLError, ToolError
    from agentrl.reward.part import Part
    from agentrl.reward.rubric import ComposedRubric
    from agentrl.tool.base import ToolReply
    from agentrl.types import (
        Action,
        Message,
        Score,
        StopReason,
        Task,
        ToolCall,
        ToolResult,
        Trajectory,
        Turn,
    )

_EXPORTS = {
    "Action": "agentrl.types",
    "AgentRLError": "agentrl.errors",
    "AsyncEnv": "agentrl.env.base",
    "ComposedRubric": "agentrl.reward.rubric",
    "Demonstration": "agentrl.env.base",
    "Env": "agentrl.env.base",
    "Episode": "agentrl.env.base",
    "Message": "agentrl.types",
    "Part": "agentrl.reward.part",
    "Score": "agentrl.types",
    "ScriptedTurn": "agentrl.env.base",
    "StopReason": "agentrl.types",
    "Task": "agentrl.types",
    "ToolCall": "agentrl.types",
    "ToolError": "agentrl.errors",
    "ToolReply": "agentrl.tool.base",
    "ToolResult": "agentrl.types",
    "Trajectory": "agentrl.types",
    "Turn": "agentrl.types",
    "make_env": "agentrl.env.registry",
    "register_env": "agentrl.env.registry",
}

__all__ = [
    "Action",
    "AgentRLError",
    "AsyncEnv",
    "ComposedRubric",
    "Demonstration",
    "Env",
    "Episode",
    "Message",
    "Part",
    "Score",
    "ScriptedTurn",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolError",
    "ToolReply",
    "ToolResult",
    "Trajectory",
    "Turn",
    "__version__",
    "make_env",
    "register_env",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
