from __future__ import annotations

import socket
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from agentrl import doctor
from agentrl.dist import machine_checks
from agentrl.dist.machine import Gpu, HostMemory
from agentrl.dist.machine_checks import (
    Check,
    Status,
    check_disk,
    check_extras,
    check_gpus,
    check_host_memory,
    check_nccl,
    check_open_files,
    check_ray,
    check_shared_memory,
    check_torch,
)
from agentrl.doctor import diagnose
from agentrl.model import load
from agentrl.rollout.engines import vllm_installed

GIB = 2**30
H200 = Gpu(index=0, name="H200", total_bytes=139 * GIB, used_bytes=0)


def _by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


ADDRESS = "cluster.address=127.0.0.1:1"


def test_a_plain_machine_passes_for_the_first_run() -> None:
    found = diagnose(["env.id=code_sandbox"], deadline_s=60)
    checks = _by_name(found.checks)
    assert checks["configuration"].status is Status.ok
    assert checks["memory plan"].status is Status.ok
    assert {"python", "torch", "cores", "open files", "disk", "host memory"} <= set(checks)
    assert found.planned is not None


def test_without_an_environment_the_machine_is_still_looked_at() -> None:
    checks = _by_name(diagnose([], deadline_s=60).checks)
    assert checks["configuration"].status is Status.ok
    assert "env.id=" in checks["configuration"].found


def test_a_refused_configuration_is_a_failure_among_others() -> None:
    found = diagnose(["env.id=code_sandbox", "rolout.n=2"], deadline_s=60)
    checks = _by_name(found.checks)
    assert found.failed and "rolout" in checks["configuration"].found
    assert {"python", "torch", "cores"} <= set(checks)
    assert found.planned is None and "memory plan" not in checks


@pytest.mark.parametrize("text", [None, "[1]", '{"model_type": "qwen3"'])
def test_a_model_that_cannot_be_read_is_a_failure(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    found = diagnose(["env.id=code_sandbox", f"model.path={tmp_path}"], deadline_s=60)
    model = _by_name(found.checks)["model"]
    assert model.status is Status.fail and str(tmp_path) in model.found


@pytest.mark.parametrize("name", ["nope", "./nope.py:Nope"])
def test_an_environment_that_does_not_exist_fails(name: str) -> None:
    found = diagnose([f"env.id='{name}'"], deadline_s=60)
    assert found.failed and _by_name(found.checks)["environment"].status is Status.fail


@pytest.mark.parametrize("answers", [False, None])
def test_a_model_that_cannot_be_reached_fails_and_costs_no_other_check(
    monkeypatch: pytest.MonkeyPatch, answers: bool | None
) -> None:
    def hub_answers() -> bool:
        return time.sleep(60) is None if answers is None else answers

    monkeypatch.setattr(load, "hub_answers", hub_answers)
    found = diagnose(["env.id=guess_number", "model.path=nobody/nothing"], deadline_s=5)
    checks = _by_name(found.checks)
    assert found.failed and found.planned is None
    assert checks["model"].status is Status.fail and "nobody/nothing" in checks["model"].found
    assert "network" in checks["model"].found + checks["model"].fix
    assert {"environment", "torch", "cores", "disk", "host memory", "open files"} <= set(checks)
    assert [check.name for check in found.checks][:3] == ["configuration", "environment", "model"]


def test_lengths_that_the_model_cannot_take_are_refused_as_a_run_would() -> None:
    found = diagnose(["env.id=guess_number", "rollout.max_context_tokens=2048"], deadline_s=60)
    assert "1024 positions" in _by_name(found.checks)["configuration"].found
    assert found.failed and found.planned is None


def test_a_check_that_hangs_or_raises_is_reported_and_holds_up_nothing() -> None:
    def broken() -> list[Check]:
        raise RuntimeError("boom")

    start = time.monotonic()

    def slow() -> list[Check]:
        time.sleep(30)
        return []

    jobs = {"slow": slow, "broken": broken, "good": lambda: []}
    looks = {name: doctor._look(name, work) for name, work in jobs.items()}
    found = doctor.in_time(looks, 0.3)
    assert time.monotonic() - start < 10
    assert found["slow"][0].status is Status.warn and "in time" in found["slow"][0].found
    assert found["broken"][0].status is Status.fail and "boom" in found["broken"][0].found
    assert found["good"] == []


def test_missing_gpus_fail_and_busy_ones_warn() -> None:
    assert check_gpus([], needed=0).status is Status.ok
    assert check_gpus([H200], needed=2).status is Status.fail
    busy = Gpu(index=0, name="H200", total_bytes=139 * GIB, used_bytes=40 * GIB)
    assert "40.0 GiB" in check_gpus([busy], needed=1).found
    assert check_torch(None, [H200]).status is Status.warn
    assert check_torch("12.8", [H200]).status is Status.ok


def test_memory_that_is_taken_by_others_warns() -> None:
    memory = HostMemory(total_bytes=24 * GIB, available_bytes=2 * GIB, limited=False)
    assert check_host_memory(memory, needed=GIB).status is Status.ok
    assert check_host_memory(memory, needed=3 * GIB).status is Status.warn


def test_a_small_or_missing_shared_memory_matters_to_ray_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"total": 64 << 20})
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage)
    assert check_shared_memory(tmp_path, uses_ray=False).status is Status.ok
    check = check_shared_memory(tmp_path, uses_ray=True)
    assert check.status is Status.warn and "--shm-size" in check.fix


def test_few_open_files_warn_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda kind: (1024, 4096))
    assert check_open_files(episodes=8).status is Status.ok
    assert "ulimit -n 2560" in check_open_files(episodes=256).fix
    assert "hard limit of 4096" in check_open_files(episodes=1000).fix


def test_a_disk_without_room_for_one_checkpoint_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10 * GIB})
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage)
    folder = tmp_path / "not" / "there" / "yet"
    sizes = {1: Status.ok, 5: Status.warn, 11: Status.fail}
    for size, status in sizes.items():
        found = check_disk(folder, checkpoint_bytes=size * GIB, keep=2)
        assert found.status is status


def test_slow_nccl_settings_are_named() -> None:
    assert check_nccl({"PATH": "/bin"}).found == "nothing set"
    assert check_nccl({"NCCL_P2P_DISABLE": "0"}).status is Status.ok
    check = check_nccl({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "WARN"})
    assert check.status is Status.warn and "NCCL_DEBUG=WARN" in check.found


def test_a_cluster_that_does_not_answer_fails() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert check_ray(address).status is Status.ok
    assert check_ray(address).status is Status.fail
    assert check_ray("nonsense").status is Status.fail
    assert check_ray(None).status is Status.ok


def test_an_extra_that_is_needed_and_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_extras", lambda: {"ray": ["no-such-package-here"]})
    (idle,) = check_extras({})
    (needed,) = check_extras({"ray": "cluster=ray"})
    assert idle.status is Status.ok
    assert needed.status is Status.fail and "pip install -e '.[ray]'" in needed.fix


@pytest.mark.parametrize(("settings", "status"), [([], "fail"), (["cluster=ray", ADDRESS], "warn")])
def test_an_engine_that_is_not_installed_fails_where_it_would_run(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], status: str
) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(vllm_installed, "version", missing)
    found = diagnose(["env.id=guess_number", "rollout=vllm", *settings])
    (check,) = (check for check in found.checks if check.name == "engine vllm")
    assert check.status == status and ".[vllm]" in check.found
