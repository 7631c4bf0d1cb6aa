"""What a box's container is made of: the request to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.supervised.bootstrap import BOOTSTRAP

if TYPE_CHECKING:
    from docker import APIClient

USER = 65534
_OWN_PROCESSES = 6
"""Beside twice the limit, as in a box of our own: the supervisor, and what is about to die."""
_OWN_MB = 48
"""The supervisor with its copy of Python, and kernel memory."""
_PYTHON = "/usr/bin/env", "python3"

# Of the host, and no business of a box: it is covered by something empty.
_MASKED = [
    *("/proc/acpi", "/proc/asound", "/proc/cmdline", "/proc/config.gz", "/proc/interrupts"),
    *("/proc/kallsyms", "/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/latency_stats"),
    *("/proc/meminfo", "/proc/modules", "/proc/sched_debug", "/proc/scsi", "/proc/slabinfo"),
    *("/proc/timer_list", "/proc/timer_stats", "/proc/version", "/proc/vmallocinfo"),
    *("/proc/zoneinfo", "/sys/block", "/sys/bus", "/sys/class", "/sys/dev", "/sys/devices"),
    *("/sys/firmware", "/sys/kernel", "/sys/module", "/sys/power"),
]


def memory_bytes(limits: SandboxLimits) -> int:
    """The control group's limit: what a program may use, full file systems, and our own needs.

    Pages of a tmpfs count here. A program meets its own limit first, which has a better name.
    """
    return (limits.memory_mb + 3 * limits.disk_mb + _OWN_MB) << 20


def max_tasks(limits: SandboxLimits) -> int:
    """The control group's limit of processes and threads."""
    return 2 * limits.max_processes + _OWN_PROCESSES


def create(
    client: APIClient,
    *,
    name: str,
    image: str,
    runtime: str | None,
    labels: dict[str, str],
    limits: SandboxLimits,
) -> None:
    """Create the container of one box; it is not started yet."""
    size = f"size={limits.disk_mb}m,nr_inodes=8192"
    own = f"uid={USER},gid={USER}"
    memory = memory_bytes(limits)
    host_config: dict[str, Any] = client.create_host_config(
        network_mode="none",
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        ipc_mode="private",
        pids_limit=max_tasks(limits),
        mem_limit=memory,
        memswap_limit=memory,  # without it, as much again in swap
        oom_score_adj=500,
        tmpfs={
            # Options in full: over a folder of the image, a tmpfs takes that folder's owner.
            "/box": f"{size},{own},mode=0700,exec",
            "/tmp": f"{size},{own},mode=1777,exec",
            "/dev/shm": f"{size},{own},mode=1777",
        },
        ulimits=[
            {"Name": "nofile", "Soft": 1024, "Hard": 1024},
            {"Name": "core", "Soft": 1, "Hard": 1},  # 0 would not keep a crash from its handler
            {"Name": "memlock", "Soft": 0, "Hard": 0},
        ],
        log_config={"Type": "none"},  # a flood must not fill the host's disk
        runtime=runtime,
    )
    host_config["CgroupnsMode"] = "private"
    host_config["MaskedPaths"] = _MASKED
    client.create_container(
        image,
        entrypoint=[*_PYTHON, "-I", "-S", "-c", BOOTSTRAP],
        name=name,
        user=f"{USER}:{USER}",
        working_dir="/box",
        hostname="sandbox",
        stdin_open=True,
        stop_signal="SIGKILL",  # no box has anything to say about its end
        healthcheck={"test": ["NONE"]},
        environment={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/box",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "PYTHONHASHSEED": "0",  # sets print in the same order in every run
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        labels=labels,
        host_config=host_config,
    )
