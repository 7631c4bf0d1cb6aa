from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import Qwen3Config

from agentrl import memory_plan
from agentrl.config.load import load
from agentrl.config.schema import Config
from agentrl.dist.machine import Gpu, HostMemory
from agentrl.dist.memory import KV_CACHE, PROCESS, ROLLOUT, WEIGHTS
from agentrl.dist.model_shape import model_shape
from agentrl.errors import ConfigError, MemoryPlanError
from agentrl.memory_plan import check_memory, keep_plan, plan_run, sleep_level
from agentrl.model.describe import model_config

GIB = 2**30
AHEAD = ["rollout.max_staleness=1", "algo.old_logprobs=recompute", "algo.correction.weight=token"]
CUT = ["rollout.stragglers=cut", "rollout.oversubscribe=2"]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_machine(monkeypatch, gpus=0)


def _set_machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int) -> None:
    found = [Gpu(index=i, name="H200", total_bytes=139 * GIB, used_bytes=0) for i in range(gpus)]
    host = HostMemory(total_bytes=24 * GIB, available_bytes=20 * GIB, limited=True)
    monkeypatch.setattr(memory_plan, "gpus", lambda: found)
    monkeypatch.setattr(memory_plan, "host_memory", lambda: host)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with nothing but a config.json: no weights."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def _config(*overrides: str) -> Config:
    return load(["env.id=guess_number", *overrides])


def _roles(config: Config) -> dict[str, Any]:
    planned = plan_run(config)
    assert planned.request is not None
    return {need.role: need for need in planned.request.models}


def test_the_default_run_fits_and_is_shown_and_kept(tmp_path: Path) -> None:
    console = Console(width=120, record=True, quiet=False, file=io.StringIO())
    planned = check_memory(_config(), quiet=False, console=console)
    keep_plan(planned, tmp_path)
    shown = console.export_text()
    assert "host memory (limit of the container)" in shown
    assert "update actor" in shown and "kv cache" in shown
    stored = json.loads((tmp_path / "memory_plan.json").read_text())
    device = stored["devices"][0]
    assert device["peak_bytes"] == max(device["phases"].values()) < 2 * GIB
    assert set(device["roles"]) == {"actor", "rollout", "processes"}


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    check_memory(_config(), quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_model_too_large_is_refused_by_its_config_alone(model: str) -> None:
    config = _config(f"model.path={model}", "rollout.max_context_tokens=2048")
    with pytest.raises(MemoryPlanError, match=r"(?s)24\.0 GiB.*actor\.recompute=full"):
        check_memory(config, quiet=True)


def test_a_gpu_is_planned_apart_from_the_host(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_machine(monkeypatch, gpus=1)
    config = _config(
        f"model.path={model}",
        "rollout.max_context_tokens=2048",
        "actor.precision=bf16",
        "actor.offload=optimizer",
        "rollout.engine.kwargs.dtype=bfloat16",
    )
    planned = check_memory(config, quiet=True)
    assert planned.plan is not None
    gpu, host = planned.plan.devices
    assert gpu.device.capacity == 139 * GIB
    waits = {role.role: role.standing for role in host.roles}["actor"]
    assert sum(waits.values()) == 8 * 1_720_574_976


def test_roles_are_those_of_the_configuration() -> None:
    assert set(_roles(_config())) == {"actor"}
    assert set(_roles(_config("algo.kl.coef=0.1"))) == {"actor", "reference"}
    assert set(_roles(_config("algo=ppo"))) >= {"actor", "critic"}
    critic = _roles(_config("algo=ppo"))["critic"]
    assert not critic.has_vocabulary and critic.trained
    assert set(_roles(_config("algo.kl.coef=0.1", "lora.rank=4"))) == {"actor"}


def test_ranks_and_workers_of_a_cluster_share_a_host_or_have_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu = _config("cluster=ray", "placement.pools.train.ranks=2", "rollout.workers=3")
    planned = plan_run(on_cpu)
    assert planned.plan is not None and planned.request is not None
    assert [d.device.num_processes for d in planned.plan.devices] == [1 + 2 + 3]
    _set_machine(monkeypatch, gpus=2)
    planned = plan_run(_config("cluster=ray", "cluster.gpus=2", "rollout.workers=2"))
    assert planned.plan is not None and planned.request is not None
    assert "each of 2 GPUs" in planned.plan.devices[0].device.name
    sampler = planned.request.sampler
    assert sampler is not None and not sampler.sleeps and sampler.num_on_gpu == 1


def test_gpus_elsewhere_have_an_unknown_capacity_and_are_not_refused() -> None:
    planned = plan_run(_config("cluster=ray", "cluster.gpus=2", "cluster.address=head:6379"))
    assert planned.plan is not None
    assert planned.plan.devices[0].device.capacity is None
    assert planned.refusal is None


def test_what_cannot_be_read_is_said_and_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    planned = plan_run(_config(f"model.path={tmp_path}"))
    assert planned.plan is None and planned.refusal is None
    assert str(tmp_path) in planned.why_not


def test_engines_sleep_where_they_do_not_fit_beside_training(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    _set_machine(monkeypatch, gpus=1)
    settings = [f"model.path={model}", "rollout=vllm", "rollout.max_context_tokens=2048"]
    small = _config("rollout=vllm")
    assert sleep_level(small, plan_run(small)) == 0
    large = _config(*settings, "rollout.gpu_memory_fraction=0.8", "actor.precision=bf16")
    planned = plan_run(large)
    assert planned.refusal is None and sleep_level(large, planned) == 2
    assert planned.plan is not None
    phases = planned.plan.devices[0].phases
    assert phases["rollout"] > 0.8 * 139 * GIB and phases["update actor"] < 139 * GIB
    awake = _config(*settings, "rollout.gpu_memory_fraction=0.8", "rollout.sleep_level=0")
    assert "rollout.gpu_memory_fraction" in (plan_run(awake).refusal or "")
    _set_machine(monkeypatch, gpus=0)
    assert sleep_level(large, plan_run(large)) == 0


@pytest.mark.parametrize("ahead", [AHEAD, CUT])
def test_engines_that_sample_while_a_step_trains_cannot_sleep(
    monkeypatch: pytest.MonkeyPatch, model: str, ahead: list[str]
) -> None:
    _set_machine(monkeypatch, gpus=1)
    large = [f"model.path={model}", "rollout=vllm", "rollout.gpu_memory_fraction=0.8"]
    config = _config(*large, "rollout.max_context_tokens=2048", "actor.precision=bf16", *ahead)
    planned = plan_run(config)
    assert "rollout.gpu_memory_fraction" in (planned.refusal or ""), "not by sleep"
    assert sleep_level(config, planned) == 0
    config = _config("rollout=vllm", "rollout.sleep_level=1", *ahead)
    with pytest.raises(ConfigError, match="sleep_level=1 with .*set rollout.sleep_level=0"):
        sleep_level(config, plan_run(config))
    _set_machine(monkeypatch, gpus=0)
    assert sleep_level(config, plan_run(config)) == 0, "nothing is shared"


def test_what_vllm_holds_on_a_cpu_is_named_for_what_it_is(model: str) -> None:
    settings = [f"model.path={model}", "rollout=vllm", "rollout.max_context_tokens=2048"]
    config = _config(*settings, "rollout.engine.kwargs.cpu_cache_mb=512")
    planned = plan_run(replace(config, rollout=replace(config.rollout, replicas_per_gpu=2)))
    assert planned.plan is not None
    role = next(role for role in planned.plan.devices[0].roles if role.role == ROLLOUT)
    shape = model_shape(model_config(model))
    assert role.standing[KV_CACHE] == 2 * 512 * 2**20
    assert role.standing[WEIGHTS] == 2 * 4 * shape.num_params
    assert role.standing[PROCESS] == 4 * 700 * 2**20
