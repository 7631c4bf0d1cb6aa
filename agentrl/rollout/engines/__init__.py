"""Rollout engines by name: :class:`~agentrl.rollout.engines.build.EngineSetup` -> engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.registry import Registry
from agentrl.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from agentrl.rollout.engines.build import EngineSetup

READ_SHAPES_ONLY = frozenset({"vllm", "sglang", "openai"})
"""Engines that hold no module of this process: it may be one without memory."""
EVALUATION_ONLY = frozenset({"openai"})
"""Engines that take no weights."""

engine_registry: Registry[Callable[[EngineSetup], RolloutEngine]] = Registry(
    "rollout engine",
    "agentrl.engines",
    {
        "hf": "agentrl.rollout.engines.build:build_hf",
        "vllm": "agentrl.rollout.engines.build:build_vllm",
        "sglang": "agentrl.rollout.engines.build:build_sglang",
        "openai": "agentrl.rollout.engines.build:build_openai",
    },
)
