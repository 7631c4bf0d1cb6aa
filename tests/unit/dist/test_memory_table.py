from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from agentrl.dist.memory import DevicePlan, MemoryPlan, RolePlan
from agentrl.dist.memory_needs import Device, Memory
from agentrl.dist.memory_table import Planned, show

MIB, GIB = 2**20, 2**30
ROLES = ("actor", "critic", "reference", "reward_model", "rollout", "processes")


def device(capacity: int | None, *, size: int, roles: tuple[str, ...] = ROLES) -> DevicePlan:
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "kv cache", "process")
    return DevicePlan(
        device=Device(
            name="each of 16 GPUs of the pool 'train'",
            memory=Memory.gpu,
            pool="train",
            capacity=capacity,
            process_bytes=0,
            num_processes=1,
        ),
        roles=[
            RolePlan(
                role=role,
                standing=dict.fromkeys(parts, size),
                working={} if role == "processes" else {f"update {role}": {"logits": MIB // 4}},
            )
            for role in roles
        ],
    )


def shown(plan: DevicePlan, *, width: int = 80) -> list[str]:
    file = io.StringIO()
    planned = Planned(request=None, plan=MemoryPlan(devices=[plan]))
    show(planned, Console(width=width, file=file))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("size", [7 * MIB, 23 * GIB])
def test_a_full_table_fits_eighty_columns_in_one_unit(size: int) -> None:
    lines = shown(device(140 * GIB, size=size))
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    assert lines == shown(device(140 * GIB, size=size), width=20)  # a pipe has no width
    units = {unit for line in lines for unit in ("MiB", "GiB") if unit in line}
    assert len(units) == 1
    (header,) = [line.split() for line in lines if "actor" in line and "update" not in line]
    assert header[1:] == list(ROLES)


def test_a_figure_that_would_round_to_nothing_is_said_to_be_small() -> None:
    lines = shown(device(None, size=MIB // 8))
    assert lines[0] == (
        "memory: each of 16 GPUs of the pool 'train': 6 MiB, capacity unknown here"
    )
    assert "<1" in next(line for line in lines if "weights" in line)


def test_a_device_without_phases_has_none_listed() -> None:
    lines = shown(device(GIB, size=MIB, roles=("processes",)))
    assert not any("idle" in line or "phase" in line for line in lines)
    plan = device(GIB, size=MIB)
    assert any("peak of each phase, MiB: update actor 42" in line for line in shown(plan))
    assert shown(replace(plan, roles=[]))[0].endswith("0 MiB of 1,024 MiB")
