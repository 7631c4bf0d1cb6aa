"""Settings of what samples: refused by name, whether or not the engine reads them."""

from __future__ import annotations

import pytest

from agentrl.config.load import load
from agentrl.errors import ConfigError

ENV = "env.id=guess_number"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.replicas_per_gpu=0"], "rollout.replicas_per_gpu=0: must be at least 1"),
        (["rollout.tensor_parallel=-1"], "rollout.tensor_parallel=-1: must be at least 1"),
        (["rollout.gpu_memory_fraction=0"], "gpu_memory_fraction=0.0: must be above 0"),
        (["rollout.gpu_memory_fraction=nan"], "gpu_memory_fraction=nan"),
        (["rollout.gpu_memory_fraction=1.5"], "gpu_memory_fraction=1.5"),
        (["rollout.sleep_level=3"], "rollout.sleep_level=3: write 0, 1, 2, or null"),
        (["rollout.sleep_level=-1"], "rollout.sleep_level=-1"),
        (["rollout.tensor_parallel=2"], "tensor_parallel=2 with rollout=hf.*rollout=vllm"),
        (["rollout.replicas_per_gpu=2"], "replicas_per_gpu=2 with rollout=hf: it has one"),
        (["rollout=openai", "rollout.tensor_parallel=2"], "with rollout=openai.*decided there"),
        (["rollout=vllm", "rollout.engine.kwargs.bucket_mb=1"], "set weight_sync.bucket_mb"),
        (["rollout=sglang", "rollout.engine.kwargs.bucket_mb=1"], "set weight_sync.bucket_mb"),
        (
            ["rollout=vllm", "rollout.engine.kwargs.blok_size=32"],
            "kwargs.blok_size: .*did you mean 'block_size'",
        ),
        (["rollout=vllm", "rollout.engine.kwargs.tensor_parallel=2"], "set rollout.tensor_par"),
        (["rollout=vllm", "rollout.engine.kwargs.gpu_memory_fraction=1"], "set rollout.gpu_mem"),
        (["rollout.engine.kwargs.max_context=8"], "max_context=8 with rollout.max_context_tok"),
        (["rollout.engine.kwargs.max_context=0"], "max_context=0: must be between 1 and"),
        (["rollout.engine.kwargs.num_slots=0"], "num_slots=0: must be between 1 and"),
        (["rollout.engine.kwargs.session_cache_mb=-1"], "session_cache_mb=-1: must be between 0"),
        (["rollout.engine.kwargs.drain_timeout_s=0"], "drain_timeout_s=0: must be a finite"),
        (["rollout.engine.kwargs.dtype=floot"], "dtype='floot': one of float32"),
        (["rollout.engine.kwargs.device=xpu"], "device='xpu': write auto, cpu, cuda or cuda:N"),
        (["rollout=vllm", "rollout.engine.kwargs.dtype=int8"], "dtype='int8': one of float32"),
        (["rollout=vllm", "rollout.engine.kwargs.dtype=bfloat16"], "with deterministic=True"),
        (["rollout=vllm", "rollout.temperature=3"], "rollout.temperature=3.0 with rollout=vllm"),
        (["rollout=vllm", "eval.temperature=0.001"], "eval.temperature=0.001 .*0 for greedy"),
        (["rollout=vllm", "rollout.engine.kwargs.block_size=0"], "block_size=0: must be between"),
        (["rollout=vllm", "rollout.engine.kwargs.seed=-1"], "seed=-1: must be between 0 and"),
        (["rollout=vllm", "rollout.engine.kwargs.start_timeout_s=nan"], "start_timeout_s=nan"),
        (["rollout=vllm", "rollout.engine.kwargs.call_timeout_s=inf"], "call_timeout_s=inf"),
        (["rollout=vllm", "rollout.engine.kwargs.lora_rank=513"], "lora_rank=513: must be betw"),
        (["rollout=vllm", "rollout.engine.kwargs.log_path=''"], "log_path='' is empty"),
        (["rollout=sglang", "rollout.engine.kwargs.port=70000"], "port=70000: must be between 1"),
        (["rollout=sglang", "rollout.engine.kwargs.base_url=here"], "base_url is 'here': write"),
        (["rollout=sglang", "rollout.engine.kwargs.request_timeout_s=-1"], "request_timeout_s=-1"),
        (["rollout=sglang", "rollout.engine.kwargs.command=[1]"], "write a list of texts"),
        (["rollout=sglang", "rollout.engine.kwargs.command=serve"], "write a list of texts"),
        (["rollout=sglang", "rollout.engine.kwargs.command=[serve]"], "where to listen"),
        (["rollout=sglang", "rollout.engine.kwargs.device=gpu"], "device='gpu': write cpu, cuda"),
        (["rollout=openai", "rollout.engine.kwargs.base_url=http://"], "base_url is 'http://'"),
        (["rollout=openai", "rollout.engine.kwargs.timeout_s=0"], "timeout_s=0: must be a finite"),
        (["rollout=openai", "rollout.engine.kwargs.max_retries=-1"], "max_retries=-1: must be b"),
        (["rollout.engine.kwargs.num_slots=many"], "num_slots: .*takes int, got 'many'"),
    ],
)
def test_what_no_engine_can_do_is_refused_before_a_model_loads(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load([ENV, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout=vllm", "rollout.replicas_per_gpu=2", "rollout.tensor_parallel=2"],
        ["rollout.sleep_level=0", "rollout.gpu_memory_fraction=1"],
        ["rollout=vllm", "rollout.engine.kwargs.block_size=32", "weight_sync.bucket_mb=1"],
        ["rollout=vllm", "rollout.temperature=2", "eval.temperature=0"],
        ["rollout=sglang", "rollout.engine.kwargs.command=[serve, '{port}']"],
        ["rollout=openai", "rollout.engine.kwargs.retry_pause_s=0"],
        ["rollout.engine.kwargs.max_context=100000", "rollout.engine.kwargs.device=cuda:1"],
    ],
)
def test_what_they_can_is_not(overrides: list[str]) -> None:
    load([ENV, *overrides])
