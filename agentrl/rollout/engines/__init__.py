"""Rollout engines by name: ``(model, *, max_context, deterministic, kwargs) -> RolloutEngine``."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.registry import Registry
from agentrl.rollout.engine import RolloutEngine

engine_registry: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine", "agentrl.engines", {"hf": "agentrl.rollout.engines.build:build_hf"}
)
