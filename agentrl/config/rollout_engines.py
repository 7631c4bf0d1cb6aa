"""Refuses settings of what samples that cannot work, or that nothing reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.kwargs import check_kwargs
from agentrl.rollout.engines.config import (
    HFEngineConfig,
    OpenAIEngineConfig,
    SGLangEngineConfig,
    VLLMEngineConfig,
)

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
_KWARGS = "rollout.engine.kwargs"


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
    yield from _kwargs_problems(kind, rollout.engine.kwargs)


def _kwargs_problems(kind: str, kwargs: dict[str, object]) -> Iterable[str]:
    settings = _SETTINGS.get(kind)
    if settings is None:  # another package's engine checks its own
        return
    if "bucket_mb" in kwargs:
        yield (
            f"{_KWARGS}.bucket_mb={kwargs['bucket_mb']}: one size holds for all ways of weights; "
            "set weight_sync.bucket_mb"
        )
        return
    try:
        check_kwargs(settings, kwargs, key=_KWARGS)
    except ConfigError as error:
        yield str(error)
