"""How each engine is made from a model and the arguments of ``rollout.engine.kwargs``."""

from __future__ import annotations

from typing import Any

from agentrl.kwargs import check_kwargs
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines.config import HFEngineConfig


def build_hf(
    model: Any, *, max_context: int, deterministic: bool, kwargs: dict[str, Any]
) -> RolloutEngine:
    """Return an :class:`~agentrl.rollout.engines.hf.HFEngine` that owns ``model``.

    Raises:
        ConfigError: ``kwargs`` names no setting of :class:`HFEngineConfig`.
        EngineError: a setting that cannot work.
    """
    from agentrl.rollout.engines.hf import HFEngine

    given = {"max_context": max_context, "deterministic": deterministic} | kwargs
    check_kwargs(HFEngineConfig, given, key="rollout.engine.kwargs")
    return HFEngine(model, HFEngineConfig(**given))
