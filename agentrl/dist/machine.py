"""What this machine has: memory of the host and of its GPUs, cores. Loads no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_QUERY = "index,uuid,name,memory.total,memory.used"
_QUERY_TIMEOUT_S = 3.0
_MIB = 2**20
_NO_LIMIT = 2**60
"""Of control groups of the first kind: what they say where there is none, and more."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Gpu:
    """A CUDA device that this process may use."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    """By whatever runs on it now."""


@dataclass(slots=True, frozen=True, kw_only=True)
class HostMemory:
    """Memory that this process may use."""

    total_bytes: int
    """Of the machine, or the limit of the control group where that is less."""
    available_bytes: int
    limited: bool
    """Whether a control group sets the total."""


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this machine, or of the container this process is in.

    Args:
        root: of the file system.
    """
    facts = _meminfo(root / "proc/meminfo")
    total = facts.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = facts.get("MemAvailable", total)
    limits = list(_limits(root))
    limit = min((limit for limit, _ in limits), default=_NO_LIMIT)
    if limit >= total:
        return HostMemory(total_bytes=total, available_bytes=available, limited=False)
    left = min(limit - used for limit, used in limits)
    return HostMemory(total_bytes=limit, available_bytes=max(min(available, left), 0), limited=True)


def gpus() -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, without touching them.

    Asks ``nvidia-smi``, since CUDA itself would claim half a GiB of the first one. Empty where
    there is no such program, or it does not answer within three seconds.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return visible(answer.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(answer: str, chosen: str | None) -> list[Gpu]:
    """Read the table of ``nvidia-smi`` and keep the devices that are named.

    Args:
        answer: rows ``index, uuid, name, MiB in all, MiB used``.
        chosen: indices or beginnings of uuids, as CUDA reads them; None for all. What follows the
            first one that is unknown does not exist.
    """
    found: dict[str, tuple[str, int, int]] = {}
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[0].isdigit() and fields[3].isdigit():
            used = int(fields[4]) if fields[4].isdigit() else 0
            found[f"{fields[0]} {fields[1]}"] = (fields[2], int(fields[3]), used)
    names = list(found)
    if chosen is not None:
        names = []
        for wanted in (part.strip() for part in chosen.split(",")):
            match = [n for n in found if wanted and _is(n, wanted)]
            if not match:
                break
            names.append(match[0])
    return [
        Gpu(
            index=index,
            name=found[name][0],
            total_bytes=found[name][1] * _MIB,
            used_bytes=found[name][2] * _MIB,
        )
        for index, name in enumerate(names)
    ]


def num_cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is(name: str, wanted: str) -> bool:
    index, uuid = name.split(" ", 1)
    return index == wanted if wanted.isdigit() else uuid.startswith(wanted)


def _meminfo(path: Path) -> dict[str, int]:
    """Return name -> bytes."""
    found: dict[str, int] = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        amount = rest.split()
        if amount and amount[0].isdigit():
            found[name] = int(amount[0]) * 1024
    return found


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield ``(limit, used)`` of every control group that this process is in, up to the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            base, limit, used = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        top = root / base
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            amount = _text(folder / limit).strip()
            if amount.isdigit() and int(amount) < _NO_LIMIT:
                current = _text(folder / used).strip()
                yield int(amount), int(current) if current.isdigit() else 0
            if folder == top:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
