from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.dist.machine import host_memory, visible

TABLE = """0, GPU-aaa, NVIDIA H200, 143771, 12
1, GPU-bbb, NVIDIA H200, 143771, [N/A]
2, GPU-ccc, NVIDIA L4, 23034, 0
"""
GIB = 2**30


def _root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


MEMINFO = {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"}


def test_a_machine_without_limits_has_what_it_has(tmp_path: Path) -> None:
    memory = host_memory(_root(tmp_path, MEMINFO))
    assert (memory.total_bytes, memory.available_bytes) == (32 * GIB, 16 * GIB)
    assert not memory.limited


def test_the_smallest_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/pods/mine\n",
        "sys/fs/cgroup/pods/memory.max": str(8 * GIB),
        "sys/fs/cgroup/pods/memory.current": str(3 * GIB),
        "sys/fs/cgroup/pods/mine/memory.max": "max",
    }
    memory = host_memory(_root(tmp_path, files))
    assert (memory.total_bytes, memory.available_bytes) == (8 * GIB, 5 * GIB)
    assert memory.limited


def test_groups_of_the_first_kind_are_read_too(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "5:cpu:/a\n4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    memory = host_memory(_root(tmp_path, files))
    assert (memory.total_bytes, memory.available_bytes) == (4 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]),
        ("2,0", ["NVIDIA L4", "NVIDIA H200"]),
        ("GPU-c", ["NVIDIA L4"]),
        ("1,7,0", ["NVIDIA H200"]),  # CUDA stops at the first that does not exist
        ("", []),
        ("-1", []),
    ],
)
def test_only_chosen_gpus_are_seen_and_counted_anew(chosen: str | None, names: list[str]) -> None:
    found = visible(TABLE, chosen)
    assert [gpu.name for gpu in found] == names
    assert [gpu.index for gpu in found] == list(range(len(names)))


def test_an_answer_that_is_no_table_means_no_gpu() -> None:
    assert visible("NVIDIA-SMI has failed because it couldn't communicate", None) == []
