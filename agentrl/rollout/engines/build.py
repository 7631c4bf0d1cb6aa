"""How each engine is made from a model and the settings of a run."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from agentrl.kwargs import check_kwargs
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines.config import (
    HFEngineConfig,
    OpenAIEngineConfig,
    SGLangEngineConfig,
    VLLMEngineConfig,
)


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
    copies: bool = False
    """Whether somebody else changes the model: what samples with it makes a copy."""
    index: int = 0
    """Of the replica."""
    bucket_mb: int = 256
    """MiB of weights that travel at once; ``weight_sync.bucket_mb`` of the run."""

    def settings(self, config: type, **given: Any) -> Any:
        """Return settings of class ``config``: ``given``, and what the user wrote over it.

        Raises:
            ConfigError: ``rollout.engine.kwargs`` names what is no setting of this engine.
        """
        kwargs = given | self.rollout.engine.kwargs
        check_kwargs(config, kwargs, key="rollout.engine.kwargs")
        return config(**kwargs)


def hf_settings(setup: EngineSetup) -> HFEngineConfig:
    """Return the settings of the ``hf`` engine of a run.

    Raises:
        ConfigError: a keyword argument that it does not take, or a setting that cannot work.
    """
    return setup.settings(
        HFEngineConfig,
        max_context=setup.rollout.max_context_tokens,
        deterministic=setup.deterministic,
    )


def build_hf(setup: EngineSetup) -> RolloutEngine:
    """Return an :class:`~agentrl.rollout.engines.hf.HFEngine` that owns the model.

    Raises:
        ConfigError: a keyword argument that it does not take, or a setting that cannot work.
    """
    from agentrl.rollout.engines.hf import HFEngine

    settings = hf_settings(setup)
    return HFEngine(copy.deepcopy(setup.model) if setup.copies else setup.model, settings)


def build_vllm(setup: EngineSetup) -> RolloutEngine:
    """Return a :class:`~agentrl.rollout.engines.vllm.VLLMEngine`, which serves once it has weights.

    Raises:
        ConfigError: vLLM is missing or of another version; a keyword argument that it does not
            take, or a setting that cannot work.
    """
    from agentrl.rollout.engines.vllm import VLLMEngine

    rollout = setup.rollout
    settings = setup.settings(
        VLLMEngineConfig,
        max_context=rollout.max_context_tokens,
        deterministic=setup.deterministic,
        tensor_parallel=rollout.tensor_parallel,
        gpu_memory_fraction=rollout.gpu_memory_fraction / rollout.replicas_per_gpu,
        sleep=bool(rollout.sleep_level),
        bucket_mb=setup.bucket_mb,
    )
    return VLLMEngine(setup.model, settings)


def build_sglang(setup: EngineSetup) -> RolloutEngine:
    """Return a :class:`~agentrl.rollout.engines.sglang.SGLangEngine`.

    Raises:
        ConfigError: a keyword argument that it does not take, or a setting that cannot work.
    """
    from agentrl.rollout.engines.sglang import SGLangEngine

    settings = setup.settings(
        SGLangEngineConfig,
        max_context=setup.rollout.max_context_tokens,
        deterministic=setup.deterministic,
        tensor_parallel=setup.rollout.tensor_parallel,
        bucket_mb=setup.bucket_mb,
    )
    return SGLangEngine(setup.model, settings, index=setup.index)


def build_openai(setup: EngineSetup) -> RolloutEngine:
    """Return an :class:`~agentrl.rollout.engines.openai.OpenAIEngine`: for evaluation.

    Raises:
        ConfigError: a keyword argument that it does not take, or a setting that cannot work.
    """
    from agentrl.rollout.engines.openai import OpenAIEngine

    settings = setup.settings(OpenAIEngineConfig, max_context=setup.rollout.max_context_tokens)
    return OpenAIEngine(settings, seed=setup.index)
