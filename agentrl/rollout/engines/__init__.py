"""Rollout engines by name: :class:`~agentrl.rollout.engines.build.EngineSetup` -> engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.errors import AgentRLError, RegistryError
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

_FACE = ("start", "generate", "end_session", "abort", "weight_specs", "update_weights", "close")


def build_engine(name: str, setup: EngineSetup) -> RolloutEngine:
    """Return an engine by id or import path, not started.

    Raises:
        RegistryError: there is none, it could not be built, or what was built is none.
        AgentRLError: a setting that cannot work.
    """
    build = engine_registry.get(name)
    try:
        engine = build(setup)
    except AgentRLError:
        raise
    except Exception as error:  # somebody else's code, whatever it raises
        raise RegistryError(
            f"rollout.engine.id={name!r}: it is called with an EngineSetup and returns a rollout "
            f"engine; this one failed with {type(error).__name__}: {error}"
        ) from error
    missing = [method for method in _FACE if not callable(getattr(engine, method, None))]
    if missing:
        raise RegistryError(
            f"rollout.engine.id={name!r} built {type(engine).__name__}, which is no rollout "
            f"engine: it lacks {', '.join(missing)}"
        )
    return engine
