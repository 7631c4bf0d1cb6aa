"""What a machine should have for a run, checked without starting anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agentrl.dist.machine import Gpu, HostMemory
from agentrl.dist.placement import count
from agentrl.extras import how_to_install

_GIB = 2**30
_MIN_PYTHON = (3, 11)
_MIN_SHM_BYTES = 2 * _GIB
_FILES_PER_EPISODE = 8
"""Pipes and sockets of an episode's sandbox, tools and remote environment."""
_OTHER_FILES = 512
_CONNECT_TIMEOUT_S = 2.0
_SLOW_NCCL = {
    "NCCL_P2P_DISABLE": "GPUs of a machine then talk through host memory",
    "NCCL_IB_DISABLE": "machines then talk over TCP in place of InfiniBand",
    "NCCL_SHM_DISABLE": "ranks of a machine then talk through the network",
}


class Status(StrEnum):
    """What a check found."""

    ok = "ok"
    warn = "warn"
    """Works, with something to know."""
    fail = "fail"
    """What the configuration needs is not there."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Check:
    """One line of a report."""

    name: str
    status: Status
    found: str
    fix: str = ""


def check_python() -> Check:
    """Look at the interpreter."""
    version = platform.python_version()
    if sys.version_info < _MIN_PYTHON:
        fix = "use Python 3.11 or newer"
        return Check(name="python", status=Status.fail, found=version, fix=fix)
    return Check(name="python", status=Status.ok, found=f"{version}, {sys.executable}")


def check_torch(cuda_version: str | None, on_gpus: list[Gpu]) -> Check:
    """Look whether torch can use the GPUs there are.

    Args:
        cuda_version: that torch was built for; None where it knows no GPU.
    """
    version = importlib.metadata.version("torch")
    if on_gpus and cuda_version is None:
        return Check(
            name="torch",
            status=Status.warn,
            found=f"{version}, built without CUDA on a machine with {count(len(on_gpus), 'GPU')}",
            fix="install a CUDA build of torch",
        )
    built = "CPU only" if cuda_version is None else f"CUDA {cuda_version}"
    return Check(name="torch", status=Status.ok, found=f"{version}, {built}")


def check_gpus(on_gpus: list[Gpu], *, needed: int) -> Check:
    """Look whether there are as many GPUs here as are needed here."""
    names = ", ".join(f"{gpu.name} {gpu.total_bytes / _GIB:.0f} GiB" for gpu in on_gpus)
    if len(on_gpus) < needed:
        return Check(
            name="gpus",
            status=Status.fail,
            found=f"{len(on_gpus)} of the {needed} that the configuration asks for {names}".strip(),
            fix="set model.device=cpu, lower cluster.gpus, or look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES",
        )
    busy = [gpu for gpu in on_gpus if gpu.used_bytes > 0.05 * gpu.total_bytes]
    if busy:
        used = ", ".join(f"GPU {gpu.index} {gpu.used_bytes / _GIB:.1f} GiB" for gpu in busy)
        fix = "the plan counts all of a GPU's memory: end what else runs there"
        return Check(name="gpus", status=Status.warn, found=f"in use: {used}", fix=fix)
    return Check(name="gpus", status=Status.ok, found=names or "none")


def check_cores(cores: int, *, processes: int) -> Check:
    """Look whether every process has a core."""
    if cores < processes:
        return Check(
            name="cores",
            status=Status.warn,
            found=f"{cores} for {processes} processes",
            fix="fewer rollout.workers, or more cores: processes will wait for each other",
        )
    return Check(name="cores", status=Status.ok, found=str(cores))


def check_host_memory(memory: HostMemory, *, needed: int) -> Check:
    """Look whether what is free now is enough."""
    limit = ", the limit of this container" if memory.limited else ""
    found = (
        f"{memory.available_bytes / _GIB:.1f} GiB free of {memory.total_bytes / _GIB:.1f}{limit}"
    )
    if needed > memory.available_bytes:
        return Check(
            name="host memory",
            status=Status.warn,
            found=f"{found}; the plan needs {needed / _GIB:.1f} GiB",
            fix="end other programs first",
        )
    return Check(name="host memory", status=Status.ok, found=found)


def check_shared_memory(path: Path = Path("/dev/shm"), *, uses_ray: bool) -> Check:
    """Look whether Ray's object store, and ranks of a machine, have shared memory."""
    name = str(path)
    try:
        size = shutil.disk_usage(path).total
    except OSError:
        status = Status.warn if uses_ray else Status.ok
        fix = "Ray then puts objects on disk, which is slow" if uses_ray else ""
        return Check(name=name, status=status, found="there is none", fix=fix)
    found = f"{size / _GIB:.1f} GiB"
    if uses_ray and size < _MIN_SHM_BYTES:
        fix = "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory)"
        return Check(name=name, status=Status.warn, found=found, fix=fix)
    return Check(name=name, status=Status.ok, found=found)


def check_open_files(*, episodes: int) -> Check:
    """Look whether a process may open what its episodes need."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = episodes * _FILES_PER_EPISODE + _OTHER_FILES
    if 0 <= limit < wanted:
        can_raise = hard < 0 or hard >= wanted
        fix = f"ulimit -n {wanted}" if can_raise else f"raise the hard limit of {hard}"
        fix += ", or lower rollout.concurrency"
        return Check(name="open files", status=Status.warn, found=f"at most {limit}", fix=fix)
    return Check(name="open files", status=Status.ok, found=f"at most {limit}")


def check_disk(folder: Path, *, checkpoint_bytes: int, keep: int) -> Check:
    """Look whether the checkpoints of a run have space.

    Args:
        folder: of the run; need not exist yet.
        checkpoint_bytes: of one.
        keep: that are there at once, besides the one being written.
    """
    nearest = folder.absolute()
    while not nearest.is_dir():
        nearest = nearest.parent
    free = shutil.disk_usage(nearest).free
    found = f"{free / _GIB:.1f} GiB free at {str(nearest)!r}"
    if not os.access(nearest, os.W_OK):
        fix = "give another trainer.run_dir"
        return Check(name="disk", status=Status.fail, found=f"{nearest} cannot be written", fix=fix)
    needed = checkpoint_bytes * (keep + 1)
    if free < needed:
        status = Status.fail if free < checkpoint_bytes else Status.warn
        return Check(
            name="disk",
            status=status,
            found=f"{found}; {keep} checkpoints and the next one take {needed / _GIB:.1f} GiB",
            fix="lower trainer.keep_last, or give trainer.run_dir on a larger disk",
        )
    return Check(name="disk", status=Status.ok, found=found)


def check_nccl(environment: Mapping[str, str]) -> Check:
    """Show what is set for NCCL."""
    found = {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
    shown = ", ".join(f"{name}={value}" for name, value in found.items()) or "nothing set"
    slow = [f"{name}: {_SLOW_NCCL[name]}" for name in found if name in _SLOW_NCCL]
    slow = [text for text in slow if found[text.partition(":")[0]] not in ("0", "")]
    if slow:
        return Check(name="nccl", status=Status.warn, found=shown, fix="unset " + "; ".join(slow))
    return Check(name="nccl", status=Status.ok, found=shown)


def check_ray(address: str | None) -> Check:
    """Look whether a cluster's head answers; starts none."""
    if address is None:
        return Check(name="ray", status=Status.ok, found="is started on this machine by the run")
    where = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if address == "auto" and not where:
        path = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        where = path.read_text().strip() if path.is_file() else ""
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        return Check(
            name="ray",
            status=Status.fail,
            found=f"cluster.address={address!r} names no host:port",
            fix="start one with `ray start --head`, or leave cluster.address out",
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        fix = "start it with `ray start --head` there, or open the way to it"
        return Check(name="ray", status=Status.fail, found=f"{where}: {error}", fix=fix)
    return Check(name="ray", status=Status.ok, found=f"{where} answers")


def check_extras(needed: Mapping[str, str]) -> Iterator[Check]:
    """Yield one line for each optional extra of agentrl.

    Args:
        needed: extra -> the setting that needs it.
    """
    for extra, packages in sorted(_extras().items()):
        versions = {name: _version(name) for name in packages}
        missing = [name for name, version in versions.items() if version is None]
        if not missing:
            found = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield Check(name=f"extra {extra}", status=Status.ok, found=found)
        elif extra in needed:
            found = f"{', '.join(missing)} missing, which {needed[extra]} needs"
            yield Check(
                name=f"extra {extra}",
                status=Status.fail,
                found=found,
                fix=how_to_install(extra),
            )
        else:
            yield Check(name=f"extra {extra}", status=Status.ok, found="not installed, not needed")


def _extras() -> dict[str, list[str]]:
    """Return extra -> its packages, without those made of other extras."""
    found: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("agentrl") or ():
        match = re.match(r"([A-Za-z0-9_.-]+)(.*?);.*extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if match and match.group(1) != "agentrl" and match.group(3) not in ("all", "dev"):
            found.setdefault(match.group(3), []).append(match.group(1))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
