"""Control groups around all boxes and around each, where this process may make them.

They bound what no resource limit counts: memory of all processes together, kernel memory, files
in memory, the processes of a box that outruns its watcher. Without them, the limits per process
and the supervisor's own counting remain. A hybrid host mounts version 2 without controllers, so
what decides is the control *file*, not the mount.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_sandboxes.supervised.owner import owner_label, owner_lives

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_PREFIX = "agentrl-boxes-"
_LIMIT_FILE = {
    (1, "memory"): "memory.limit_in_bytes",
    (2, "memory"): "memory.max",
    (1, "pids"): "pids.max",
    (2, "pids"): "pids.max",
}
_SWAP = {1: ("memory.memsw.limit_in_bytes", None), 2: ("memory.swap.max", "0")}
_EVENTS_FILE = {1: "memory.oom_control", 2: "memory.events"}
_REMOVE_S = 1.0
_MAX_FREE = 64
_numbers = itertools.count(1)


@dataclass(slots=True, kw_only=True)
class BoxGroup:
    """The groups of one box: entered by the box itself, ours again when it is dead."""

    limits: dict[str, int]
    folders: list[Path]
    join_files: list[Path]
    events_file: Path | None

    def open_files(self) -> tuple[list[int], int | None]:
        """Descriptors to enter the groups with, and that of the count of kills. Close them.

        The kernel checks the rights of whoever opened them, so a box without any can use them.
        """
        opened: list[int] = []
        try:
            opened += [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in self.join_files]
            if self.events_file is None:
                return opened, None
            return opened, os.open(self.events_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            for fd in opened:
                os.close(fd)
            raise

    def oom_kills(self) -> int:
        """How many processes the kernel killed because of the memory limit."""
        return _count_kills(self.events_file) if self.events_file is not None else 0


@dataclass(slots=True)
class _Place:
    """A group of ours that holds some controllers."""

    version: int
    folder: Path
    controllers: list[str] = field(default_factory=list)
    per_box: bool = False


class BoxesGroup:
    """The groups made for one zygote: one of version 2, or one per controller of version 1."""

    def __init__(self, *, memory_bytes: int, max_tasks: int) -> None:
        self._places: list[_Place] = []
        self._enforced: dict[str, str] = {}
        self._free: list[BoxGroup] = []
        self._late: list[Path] = []
        name = f"{_PREFIX}{owner_label()}-{next(_numbers)}"
        for controller, value in (("memory", memory_bytes), ("pids", max_tasks)):
            for version, parent in _parents(controller):
                if self._try_limit(controller, version, parent / name, value):
                    break
        for place in self._places:
            place.per_box = place.version == 1 or _delegate(place)

    def add(self, pid: int) -> None:
        """Put the zygote, and what it will fork, into the groups; drop those it cannot enter."""
        for place in list(self._places):
            # In version 2 a group with groups below it holds no processes itself.
            inner = place.version == 2 and place.per_box
            folder = place.folder / "zygote" if inner else place.folder
            try:
                if not folder.exists():
                    _make(folder)
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:
                self._places.remove(place)
                for controller in place.controllers:
                    del self._enforced[controller]
                _remove(place.folder)

    def enforced(self) -> dict[str, str]:
        """Controller → its limit for all boxes as read back, with the version that holds it."""
        return dict(self._enforced)

    def enforced_per_box(self) -> dict[str, str]:
        """Controller → the version that holds it for each box."""
        return {
            controller: f"cgroup v{place.version}"
            for place in self._places
            if place.per_box
            for controller in place.controllers
        }

    def make_box_group(self, number: int, limits: dict[str, int]) -> BoxGroup:
        """Return groups for one box with its limits by controller; those of a dead one serve again.

        Raises:
            OSError: the system has no room for another group.
        """
        for position, group in enumerate(self._free):
            if group.limits == limits:
                return self._free.pop(position)
        group = BoxGroup(limits=limits, folders=[], join_files=[], events_file=None)
        try:
            for place in self._places:
                if place.per_box:
                    self._make_one(group, place, place.folder / f"box-{number}")
        except OSError:
            self._remove_later(group)
            raise
        return group

    def return_box_group(self, group: BoxGroup) -> None:
        """Take the groups of a dead box back."""
        if group.oom_kills() == 0 and len(self._free) < _MAX_FREE:
            self._free.append(group)
        else:
            self._remove_later(group)

    def _remove_later(self, group: BoxGroup) -> None:
        """Remove groups; those that are still busy go with the next ones."""
        waiting, self._late = self._late + group.folders, []
        self._late = [folder for folder in waiting if not _try_remove(folder)]

    def remove(self) -> None:
        """Remove the groups; their processes have ended before."""
        for place in self._places:
            _remove(place.folder)
        self._places.clear()
        self._free.clear()
        self._late.clear()

    def _try_limit(self, controller: str, version: int, folder: Path, value: int) -> bool:
        made = not folder.exists()
        try:
            if made:
                _make(folder)
            limit = folder / _LIMIT_FILE[version, controller]
            _set(limit, value)
            if controller == "memory":
                _forbid_swap(version, folder, value)
            self._enforced[controller] = f"cgroup v{version}: {limit.read_text().strip()}"
        except OSError:
            if made:
                _try_remove(folder)
            return False
        place = next((p for p in self._places if p.folder == folder), None)
        if place is None:
            place = _Place(version, folder)
            self._places.append(place)
        place.controllers.append(controller)
        return True

    def _make_one(self, group: BoxGroup, place: _Place, folder: Path) -> None:
        _make(folder)
        group.folders.append(folder)
        for controller in place.controllers:
            _set(folder / _LIMIT_FILE[place.version, controller], group.limits[controller])
        if "memory" in place.controllers:
            _forbid_swap(place.version, folder, group.limits["memory"])
            group.events_file = folder / _EVENTS_FILE[place.version]
        # A single thread moves itself without the lock that a whole process needs.
        group.join_files.append(folder / ("tasks" if place.version == 1 else "cgroup.procs"))


def sweep_groups() -> None:
    """End and remove what owners left that no longer live."""
    parents = {parent for name in ("memory", "pids") for _, parent in _parents(name)}
    for parent in parents:
        for folder in parent.glob(f"{_PREFIX}*"):
            if not owner_lives(folder.name.removeprefix(_PREFIX)):
                _remove(folder)


def _parents(controller: str) -> list[tuple[int, Path]]:
    """Where a group of ours could lie, best first: (version, folder of an existing group)."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, Path]] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            found += [(1, _own_folder(_ROOT / controller, path))]
        elif names == "":
            own = _own_folder(_ROOT, path)
            # Our own group holds processes, so its parents are the likelier ones.
            above = [parent for parent in own.parents if parent.is_relative_to(_ROOT)]
            found += [(2, folder) for folder in (own, *above)]
    return found


def _own_folder(mount: Path, path: str) -> Path:
    # In a container the path names the host's tree, and the mount itself is our group.
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount


def _delegate(place: _Place) -> bool:
    """Let groups below this one of version 2 have its controllers."""
    wanted = " ".join(f"+{controller}" for controller in place.controllers)
    try:
        _set(place.folder / "cgroup.subtree_control", wanted)
    except OSError:
        return False
    return True


def _set(file: Path, value: int | str) -> None:
    if not file.exists():  # never make a file where the controller is missing
        raise FileNotFoundError(file)
    file.write_text(str(value))


def _forbid_swap(version: int, folder: Path, memory_bytes: int) -> None:
    name, value = _SWAP[version]
    with contextlib.suppress(OSError):  # a kernel without swap accounting lacks the file
        _set(folder / name, memory_bytes if value is None else value)


def _count_kills(events: Path) -> int:
    with contextlib.suppress(OSError):
        for line in events.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _make(folder: Path) -> None:
    folder.mkdir()  # the kernel fills it with control files


def _unmake(folder: Path) -> None:
    folder.rmdir()  # as it is: control files do not count


def _try_remove(folder: Path) -> bool:
    try:
        _unmake(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Kill what is left in a group and those below it, and remove them."""
    end = time.monotonic() + _REMOVE_S
    while True:  # a group is busy until its last process is reaped
        inner = [child for child in _children(folder) if not _try_remove(child)]
        if not inner and _try_remove(folder):
            return
        if time.monotonic() > end:
            return  # the next start tries again
        for busy in (*inner, folder):
            _kill_members(busy)
        time.sleep(0.005)


def _children(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir()]
    except OSError:
        return []


def _kill_members(folder: Path) -> None:
    try:
        pids = [int(word) for word in (folder / "cgroup.procs").read_text().split()]
    except (OSError, ValueError):
        return
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
