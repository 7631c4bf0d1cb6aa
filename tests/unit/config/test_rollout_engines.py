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
    ],
)
def test_what_they_can_is_not(overrides: list[str]) -> None:
    load([ENV, *overrides])
