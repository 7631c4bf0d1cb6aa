"""How each engine is made from a model and the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentrl.kwargs import check_kwargs
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines.config import HFEngineConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineSetup:
    """What an engine is built from."""

    model: Any
    """A causal language model of ``transformers``. An engine that samples with it owns it; others
    read its configuration, and get the weights as they get every later version."""
    rollout: RolloutConfig
    """Settings of the run; those of the engine itself stand in ``engine.kwargs``."""
    deterministic: bool
    """The result of a request depends on nothing but the request and the weights."""
    index: int = 0
    """Of the replica."""

    def settings(self, config: type, **given: Any) -> Any:
        """Return settings of class ``config``: ``given``, and what the user wrote over it.

        Raises:
            ConfigError: ``rollout.engine.kwargs`` names what is no setting of this engine.
        """
        kwargs = given | self.rollout.engine.kwargs
        check_kwargs(config, kwargs, key="rollout.engine.kwargs")
        return config(**kwargs)


def build_hf(setup: EngineSetup) -> RolloutEngine:
    """Return an :class:`~agentrl.rollout.engines.hf.HFEngine` that owns the model.

    Raises:
        ConfigError: a keyword argument that it does not take.
        EngineError: a setting that cannot work.
    """
    from agentrl.rollout.engines.hf import HFEngine

    settings = setup.settings(
        HFEngineConfig,
        max_context=setup.rollout.max_context_tokens,
        deterministic=setup.deterministic,
    )
    return HFEngine(setup.model, settings)
