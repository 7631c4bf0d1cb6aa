"""Refuses settings of what samples that cannot work, or that nothing reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.kwargs import check_kwargs
from agentrl.rollout.engines.config import (
    VLLM_TEMPERATURES,
    HFEngineConfig,
    OpenAIEngineConfig,
    SGLangEngineConfig,
    VLLMEngineConfig,
)
from agentrl.rollout.engines.setting_checks import KWARGS, setting_problems

if TYPE_CHECKING:
    from agentrl.config.schema import Config

_SETTINGS = {
    "hf": HFEngineConfig,
    "vllm": VLLMEngineConfig,
    "sglang": SGLangEngineConfig,
    "openai": OpenAIEngineConfig,
}
_NOT_SPLIT = {
    "hf": "it computes on one device",
    "openai": "how its server is run is decided there",
}
_MAX_SLEEP_LEVEL = 2
_OF_THE_RUN = {
    "bucket_mb": "weight_sync.bucket_mb",
    "tensor_parallel": "rollout.tensor_parallel",
    "gpu_memory_fraction": "rollout.gpu_memory_fraction",
}
"""What engines are told by the run, which plans memory and places processes by it."""


def rollout_engine_problems(config: Config) -> Iterable[str]:
    """Yield what is wrong with the engines of ``rollout``, one line each."""
    rollout, kind = config.rollout, config.rollout.engine.id
    for name in ("replicas_per_gpu", "tensor_parallel"):
        if (value := getattr(rollout, name)) < 1:
            yield f"rollout.{name}={value}: must be at least 1"
    if not 0.0 < rollout.gpu_memory_fraction <= 1.0:
        yield (
            f"rollout.gpu_memory_fraction={rollout.gpu_memory_fraction}: must be above 0 and at "
            "most 1"
        )
    if rollout.sleep_level is not None and not 0 <= rollout.sleep_level <= _MAX_SLEEP_LEVEL:
        yield (
            f"rollout.sleep_level={rollout.sleep_level}: write 0, 1, 2, or null for what memory "
            "needs"
        )
    if kind in _NOT_SPLIT and rollout.tensor_parallel > 1:
        yield (
            f"rollout.tensor_parallel={rollout.tensor_parallel} with rollout={kind}: "
            f"{_NOT_SPLIT[kind]}; leave it at 1, or sample with rollout=vllm"
        )
    if kind == "hf" and rollout.replicas_per_gpu > 1:
        yield (
            f"rollout.replicas_per_gpu={rollout.replicas_per_gpu} with rollout=hf: it has one, "
            "which works at many requests at once; leave it at 1, or sample with rollout=vllm"
        )
    if kind == "vllm":
        yield from _temperatures(config)
    yield from _kwargs_problems(config)


def _temperatures(config: Config) -> Iterable[str]:
    coldest, hottest = VLLM_TEMPERATURES
    for key in ("rollout.temperature", "eval.temperature"):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value and not coldest <= value <= hottest:
            greedy = ", or 0 for greedy" if section == "eval" else ""
            yield (
                f"{key}={value} with rollout=vllm: vLLM samples at {coldest} to {hottest}; write "
                f"one of those{greedy}"
            )


def _kwargs_problems(config: Config) -> Iterable[str]:
    kind, kwargs = config.rollout.engine.id, config.rollout.engine.kwargs
    max_context, deterministic = config.rollout.max_context_tokens, config.trainer.deterministic
    settings = _SETTINGS.get(kind)
    if settings is None:  # another package's engine checks its own
        return
    try:
        check_kwargs(settings, kwargs, key=KWARGS)
        given = {} if kind == "openai" else {"deterministic": deterministic}
        found = settings(**(given | kwargs))
    except ConfigError as error:
        yield str(error)
        return
    for name, key in _OF_THE_RUN.items():
        if name in kwargs:
            yield f"{KWARGS}.{name}={kwargs[name]}: the run says so to its engines; set {key}"
            return
    yield from setting_problems(found)
    if 1 <= kwargs.get("max_context", max_context) < max_context:
        yield (
            f"{KWARGS}.max_context={kwargs['max_context']} with "
            f"rollout.max_context_tokens={max_context}: the engine would refuse what an episode "
            "may ask for; lower rollout.max_context_tokens instead, and leave max_context out"
        )
