"""What a sandbox test sees of its host, and how to run one with a deadline."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentrl_sandboxes.local import LocalBackend

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class HostListing:
    descriptors: set[str]
    mounts: str
    scratch: set[str]
    groups: set[str]


def list_host() -> HostListing:
    """Everything that a box could leave behind in or around this process."""
    own = f"agentrl-boxes-{os.getpid()}-"
    groups = {str(p) for p in Path("/sys/fs/cgroup").glob("*/**/agentrl-boxes-*") if own in p.name}
    scratch = Path(tempfile.gettempdir())
    return HostListing(
        descriptors={
            f"{fd.name}:{target}"
            for fd in Path("/proc/self/fd").iterdir()
            if (target := _link(fd)) and not target.startswith("/proc/")
        },
        mounts=Path("/proc/self/mounts").read_text(),
        scratch={p.name for p in scratch.iterdir() if p.name.startswith("agentrl-unsafe-")},
        groups=groups,
    )


def descendants() -> set[tuple[int, str]]:
    """(pid, start time) of every process below this one."""
    parent_of: dict[int, int] = {}
    start_of: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parent_of[int(folder.name)] = int(fields[1])
            start_of[int(folder.name)] = fields[19]
    found: set[int] = {os.getpid()}
    grew = True
    while grew:
        more = {pid for pid, parent in parent_of.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return {(pid, start_of[pid]) for pid in found if pid != os.getpid()}


def alive(processes: set[tuple[int, str]]) -> set[int]:
    """Which of these processes still exist."""
    left = set()
    for pid, start in processes:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[19] == start:
            left.add(pid)
    return left


def run_scenario(scenario: Callable[[LocalBackend], Awaitable[T]], deadline_s: float = 60.0) -> T:
    """Run a scenario on a backend of its own; the host must look as before afterwards."""

    async def main() -> T:
        backend = LocalBackend()
        before = descendants()
        async with asyncio.timeout(deadline_s):
            await backend.start()
            try:
                result = await scenario(backend)
                ours = descendants() - before
                assert ours, "the boxes are processes below this one"
            finally:
                await backend.close()
        assert not alive(ours)
        return result

    asyncio.run(_warm_loop())
    before = list_host()
    result = asyncio.run(main())
    assert list_host() == before
    return result


async def _warm_loop() -> None:
    await asyncio.sleep(0)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
