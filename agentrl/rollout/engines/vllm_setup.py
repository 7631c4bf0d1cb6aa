"""What vLLM's process is told at its start: model, arguments, environment. Imports no vLLM."""

from __future__ import annotations

import asyncio
import copy
import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.errors import EngineError
from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.vllm_installed import InstalledVLLM
from agentrl.rollout.engines.vllm_wire import Setup

WORKER_EXTENSION = "agentrl.rollout.engines.vllm_worker.WorkerExtension"
_CPU_BATCH = 4096
"""Tokens of one step of the CPU build, which takes prompts whole."""
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Steps that also hold prompts run without a graph. ``FULL`` would replay one for them that was
captured with the shortest prompts there can be, and whatever a longer one has beyond the first tile
of attention is left uncomputed: the first token of a turn comes from noise, without an error."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM allocates for."""
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class ModelPlan:
    """What is known of a model without its weights.

    Args:
        model: a causal language model of ``transformers``, which is read and not kept, or its
            configuration.
    """

    def __init__(self, model: Any) -> None:
        module = model if hasattr(model, "named_parameters") else _without_weights(model)
        self.shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        """Of every parameter, tied ones once."""
        self.config = copy.deepcopy(module.config)
        self.config.architectures = [type(module).__name__]
        self.vocab_size = int(module.config.vocab_size)

    def write(self, directory: Path, dtype: str) -> None:
        """Write a config.json that vLLM can start from."""
        self.config.dtype = dtype
        self.config.save_pretrained(directory)


def served_dtype(config: VLLMEngineConfig) -> str:
    """Return the name of the dtype that weights are served in."""
    return config.dtype or ("float32" if config.deterministic else "bfloat16")


def make_directory() -> Path:
    """Return a new folder for what an engine starts from, and for its log.

    Raises:
        EngineError: there is no place for one.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="agentrl-vllm-"))
    except OSError as error:
        raise _no_place(error) from error


def _no_place(error: OSError) -> EngineError:
    return EngineError(
        f"vLLM starts from files in the folder for temporary ones, which cannot be written: "
        f"{error}; make room there, or set TMPDIR to another folder"
    )


def make_setup(config: VLLMEngineConfig, plan: ModelPlan, model_dir: Path) -> Setup:
    """Write the model's configuration and return what the process is told first.

    Raises:
        EngineError: it cannot be written.
    """
    dtype = served_dtype(config)
    try:
        plan.write(model_dir, dtype)
    except OSError as error:
        raise _no_place(error) from error
    args: dict[str, Any] = {
        "worker_extension_cls": WORKER_EXTENSION,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": config.seed,
        "max_model_len": config.max_context,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_fraction,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else "uni",
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": config.sleep,
        "enforce_eager": bool(config.enforce_eager),
    }
    if not config.enforce_eager and not config.torch_compile:
        args["compilation_config"] = dict(_GRAPHS)
    if config.max_batched_tokens is not None:
        args["max_num_batched_tokens"] = config.max_batched_tokens
    if config.block_size is not None:
        args["block_size"] = config.block_size
    if config.lora_rank:
        rank = next(size for size in _LORA_RANKS if size >= config.lora_rank)
        args |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
    on_cpu: dict[str, Any] = {
        "enable_sleep_mode": False,
        "kv_cache_memory_bytes": config.cpu_cache_mb << 20,
        "block_size": config.block_size or 32,
        # A prompt cut in two rewinds its generator after the first part: those of CPUs cannot.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_context, config.max_batched_tokens or _CPU_BATCH),
    }
    if config.enforce_eager is None:
        on_cpu |= {"enforce_eager": True, "compilation_config": {"mode": 0}}
    return Setup(model_dir=str(model_dir), expected=plan.shapes, engine_args=args, cpu_args=on_cpu)


def child_environment(config: VLLMEngineConfig, installed: InstalledVLLM) -> dict[str, str]:
    """Return the environment of vLLM's process; that of this one stays as it is.

    What a user has set wins, except where the engine could not work with it.
    """
    wanted: Mapping[str, str] = {
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it has no logprobs after temperature
    }
    env = {**wanted, **os.environ}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core runs in that process itself
    if config.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = config.devices
    if config.deterministic and not installed.is_cpu:
        env["VLLM_BATCH_INVARIANT"] = "1"
        env.setdefault("TRITON_F32_DEFAULT", "ieee")  # else its kernels round float32 to TF32
    if installed.is_cpu:
        env.setdefault("TORCH_COMPILE_DISABLE", "1")  # a first request in 1 s instead of a minute
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # replicas share the cores
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # and threads that spin would hold them
    return env


def turn_to_start(*, on_cpu: bool) -> AbstractAsyncContextManager[Any]:
    """Wait until no other engine of this process starts on a GPU.

    vLLM takes what is free on the GPU when it starts for what it may have, and dies where that
    changes under it.
    """
    if on_cpu:
        return nullcontext()
    return _STARTING.setdefault(asyncio.get_running_loop(), asyncio.Lock())


def _without_weights(config: Any) -> Any:
    """Build the model of a configuration with parameters that have shapes and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
