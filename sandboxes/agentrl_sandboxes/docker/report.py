"""What holds in a container, as the engine says and as the box read back about itself."""

from __future__ import annotations

import os
from typing import Any

from agentrl.sandbox.base import SandboxReport

_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")


def describe(inspected: dict[str, Any], facts: dict[str, Any], max_tasks: int) -> SandboxReport:
    """Build the report from an inspected container and from its own facts."""
    host_config = inspected["HostConfig"]
    groups = facts["cgroup"]
    memory = _group(groups, "memory", int(host_config["Memory"]))
    processes = _group(groups, "pids", max_tasks)
    warnings = []
    if memory is None:
        warnings.append(
            "no memory control group holds in a container here: its memory is bounded by counting "
            "every 50 ms, and that of all containers together is not (a rootless engine needs "
            "delegated control groups; gVisor is run with --ignore-cgroups)"
        )
    if processes is None:
        warnings.append("no pids control group holds here: processes are counted every 50 ms")
    if facts["seccomp"] != "2":
        warnings.append(
            "no system-call filter of the kernel holds here; the runtime "
            f"{inspected['HostConfig'].get('Runtime')!r} has to stand in for it"
        )
    counted = "summed by the supervisor; RLIMIT_AS per process"
    limits = {
        "wall": "supervisor: interrupt, then kill",
        "cpu": "RLIMIT_CPU per process",
        "memory": f"{counted}; container: {memory or 'not bounded'}",
        "processes": f"counted by the supervisor; container: {processes or 'not bounded'}",
        "disk": "tmpfs size: " + facts["mounts"].get("/box", ["", "not mounted"])[1],
        "output": "supervisor: truncate, then kill",
    }
    return SandboxReport(
        backend="docker",
        isolation=_isolation(inspected, facts),
        limits=limits,
        warnings=tuple(warnings),
    )


def _group(groups: dict[str, Any], name: str, wanted: int) -> str | None:
    """The limit as read inside, if it is the one that was asked for."""
    version, value = groups.get(name, (0, "max"))
    if not value.isdigit() or int(value) > wanted:
        return None
    return f"cgroup v{version}: {value}"


def _isolation(inspected: dict[str, Any], facts: dict[str, Any]) -> tuple[str, ...]:
    """Only what was observed: a namespace counts if it is another one than ours."""
    held = [
        f"{name} namespace"
        for name in _NAMESPACES
        if facts["namespaces"].get(name) not in (None, os.readlink(f"/proc/self/ns/{name}"))
    ]
    if facts["interfaces"] in ([], ["lo"]):
        held.append("no network")
    if "ro" in facts["mounts"].get("/", ["", ""])[1].split(","):
        held.append("read-only root")
    if facts["seccomp"] == "2":
        held.append("seccomp filter")
    if facts["no_new_privs"] == "1":
        held.append("no new privileges")
    if int(facts["capabilities"] or "1", 16) == 0 and int(facts["bounding"] or "1", 16) == 0:
        held.append("no capabilities")
    runtime = inspected["HostConfig"].get("Runtime")
    if runtime and runtime != "runc":
        held.append(f"runtime {runtime}")
    return tuple(held)
