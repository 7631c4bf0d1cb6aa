"""A control group around all boxes, where this process may make one.

It bounds what no resource limit counts: the memory of all boxes together, kernel memory, and
the processes of a box that outruns its watcher. Without one, the limits per process and the
supervisor's own counting remain. A hybrid host mounts version 2 without controllers, so what
decides is the control *file*, not the mount.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "agentrl-boxes-"
_LIMIT_FILES = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
}


class BoxesGroup:
    """The groups made for one zygote: one of version 2, or one per controller of version 1."""

    def __init__(self, *, memory_bytes: int, max_tasks: int) -> None:
        self._folders: list[Path] = []
        self._enforced: dict[str, str] = {}
        name = f"{_PREFIX}{os.getpid()}-{time.monotonic_ns()}"
        for controller, value in (("memory", memory_bytes), ("pids", max_tasks)):
            for version, parent in _parents(controller):
                _sweep(parent)
                if self._try_limit(controller, version, parent / name, value):
                    break

    def add(self, pid: int) -> None:
        """Put a process, and what it will fork, into the groups."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def enforced(self) -> dict[str, str]:
        """Controller → its limit as read back, with the version that holds it."""
        return dict(self._enforced)

    def remove(self) -> None:
        """Remove the groups; their processes have ended before."""
        for folder in self._folders:
            for _ in range(200):  # a group is busy until its last process is reaped
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.005)
        self._folders.clear()

    def _try_limit(self, controller: str, version: int, folder: Path, value: int) -> bool:
        limit = folder / _LIMIT_FILES[controller][0 if version == 2 else 1]
        made = not folder.exists()
        try:
            folder.mkdir(exist_ok=True)
            if not limit.exists():
                raise FileNotFoundError(limit)
            limit.write_text(str(value))
            self._enforced[controller] = f"cgroup v{version}: {limit.read_text().strip()}"
        except OSError:
            if made and folder.exists():
                folder.rmdir()
            return False
        if folder not in self._folders:
            self._folders.append(folder)
        return True


def _parents(controller: str) -> list[tuple[int, Path]]:
    """Where a group of ours could lie: (version, folder of this process's own group)."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            found.append((1, _ROOT / controller, path))
        elif names == "":
            found.append((2, _ROOT, path))
    # In a container the path names the host's tree, and the mount itself is our group.
    return [
        (version, mount / path.lstrip("/") if (mount / path.lstrip("/")).is_dir() else mount)
        for version, mount, path in found
    ]


def _sweep(parent: Path) -> None:
    """Remove groups left by processes that no longer live; a busy one stays."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            try:
                folder.rmdir()
            except OSError:
                continue
