"""What of an engine's settings cannot work, told by name before a model loads. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from agentrl.errors import ConfigError
from agentrl.rollout.engines.config import (
    HFEngineConfig,
    OpenAIEngineConfig,
    SGLangEngineConfig,
    VLLMEngineConfig,
)
from agentrl.rollout.engines.http import why_no_url

KWARGS = "rollout.engine.kwargs"
"""Where a run's configuration has them."""
EngineConfig = HFEngineConfig | VLLMEngineConfig | SGLangEngineConfig | OpenAIEngineConfig

_MAX_SEED = 2**32 - 1
_MAX_PORT = 65535
_NUMBERS: Mapping[str, tuple[int, float]] = {
    "num_slots": (1, 1 << 20),
    "max_context": (1, 10_000_000),
    "prefill_tokens": (1, 1 << 24),
    "session_cache_mb": (0, 1 << 30),
    "num_threads": (1, 1024),
    "max_num_seqs": (1, 1 << 20),
    "max_batched_tokens": (1, 1 << 24),
    "cpu_cache_mb": (1, 1 << 30),
    "block_size": (1, 1 << 16),
    "tensor_parallel": (1, 1024),
    "lora_rank": (0, 512),
    "seed": (0, _MAX_SEED),
    "bucket_mb": (1, 1 << 20),
    "max_connections": (1, 1 << 16),
    "max_retries": (0, 10_000),
    "retry_pause_s": (0, 3600),
    "verify_tensors": (0, 1 << 20),
    "port": (1, _MAX_PORT),
}
"""Least and most of a number; the wide upper ends only catch a slip of the hand."""
_DTYPES = {
    HFEngineConfig: ("float32", "bfloat16", "float16", "float64"),
    VLLMEngineConfig: ("float32", "bfloat16", "float16"),
}


def check_settings(config: EngineConfig) -> None:
    """Refuse settings that cannot work.

    Raises:
        ConfigError: names each of them.
    """
    if problems := list(setting_problems(config)):
        raise ConfigError("\n".join(problems))


def setting_problems(config: EngineConfig) -> Iterator[str]:
    """Say what of an engine's settings cannot work, one line each."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None:
            continue
        if name.endswith("timeout_s") and not (value > 0 and math.isfinite(value)):
            yield f"{KWARGS}.{name}={value:g}: must be a finite number above 0"
        low, high = _NUMBERS.get(name, (-math.inf, math.inf))
        if name in _NUMBERS and not low <= value <= high:
            yield f"{KWARGS}.{name}={value}: must be between {low} and {high}"
        if isinstance(value, str) and not value.strip():
            yield f"{KWARGS}.{name}={value!r} is empty; leave it out"
    if isinstance(config, HFEngineConfig | VLLMEngineConfig):
        yield from _dtype(config)
    if isinstance(config, HFEngineConfig | SGLangEngineConfig):
        yield from _device(config)
    if isinstance(config, VLLMEngineConfig) and not 0.0 < config.gpu_memory_fraction <= 1.0:
        yield f"{KWARGS}.gpu_memory_fraction={config.gpu_memory_fraction}: above 0, at most 1"
    if isinstance(config, OpenAIEngineConfig) and (reason := why_no_url(config.base_url)):
        yield f"{KWARGS}.base_url {reason}: write http://host:port/v1"
    if isinstance(config, SGLangEngineConfig):
        yield from _sglang(config)


def _dtype(config: HFEngineConfig | VLLMEngineConfig) -> Iterator[str]:
    known = _DTYPES[type(config)]
    if config.dtype is not None and config.dtype not in known:
        yield f"{KWARGS}.dtype={config.dtype!r}: one of {', '.join(known)}"
    elif (
        isinstance(config, VLLMEngineConfig)
        and config.deterministic
        and config.dtype not in (None, "float32")
    ):
        yield (
            f"{KWARGS}.dtype={config.dtype!r} with deterministic=True: that mode computes in "
            "float32; leave dtype out, or set deterministic=False"
        )


def _device(config: HFEngineConfig | SGLangEngineConfig) -> Iterator[str]:
    others = ["auto"] if isinstance(config, HFEngineConfig) else []
    if config.device not in others and not re.fullmatch(r"cpu|cuda(:\d{1,4})?", config.device):
        known = ", ".join([*others, "cpu", "cuda"])
        yield f"{KWARGS}.device={config.device!r}: write {known} or cuda:N"


def _sglang(config: SGLangEngineConfig) -> Iterator[str]:
    url = config.base_url.replace("{port}", str(min(max(config.port, 1), _MAX_PORT)))
    if reason := why_no_url(url):
        yield f"{KWARGS}.base_url {reason}: write http://host:{{port}}"
    command = config.command
    if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
        yield (
            f"{KWARGS}.command={command!r}: write a list of texts, the program and its arguments, "
            "such as [python, -m, sglang.launch_server, --port, '{port}']"
        )
    elif command and "{port}" not in " ".join(command):
        yield f"{KWARGS}.command={command}: it must say where to listen, with '{{port}}'"
