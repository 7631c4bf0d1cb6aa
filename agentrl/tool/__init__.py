"""Tools: what the model may call.

``from agentrl.tool import tool, ToolLimits`` marks a function as one; both load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.tool.decorator import tool
    from agentrl.tool.spec import ToolLimits

__all__ = ["ToolLimits", "tool"]

_EXPORTS = {"ToolLimits": "agentrl.tool.spec", "tool": "agentrl.tool.decorator"}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'agentrl.tool' has no attribute {name!r}")
