"""Rollout engines by name."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.registry import Registry
from agentrl.rollout.engine import RolloutEngine

engine_registry: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine", "agentrl.engines", {"hf": "agentrl.rollout.engines.hf:HFEngine"}
)
