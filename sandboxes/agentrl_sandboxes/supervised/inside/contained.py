"""The supervisor as the main process of a container: its channel is standard input and output.

The engine has made the namespaces, the mounts and the control groups. What it left is given up
here, in the same way as in a box of our own: rights, system calls, and being looked at.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from typing import Any

from . import kernel, seccomp, supervisor, wire, zygote

EXPIRED = 124
"""Exit code of a box that has outlived its time."""

_MAX_FIRST_BYTES = 1 << 16
_NO_LIMIT_BYTES = 1 << 60
_CGROUP_FILES = {
    "memory": ("memory.max", "memory/memory.limit_in_bytes"),
    "pids": ("pids.max", "pids/pids.max"),
}


class PipeChannel:
    """Two pipes in the place of a socket."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd

    def fileno(self) -> int:
        """The descriptor to poll: it hangs up when the host is gone."""
        return self._read_fd

    def recv(self, size: int) -> bytes:
        """Read what is there, waiting for it; empty at the end."""
        return os.read(self._read_fd, size)

    def sendall(self, data: bytes) -> None:
        """Write all of it."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._write_fd, rest) :]


def main() -> None:
    """Entry point: the first frame holds the limits and how long this box may live at most."""
    channel = PipeChannel(os.dup(0), os.dup(1))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    message = wire.receive(channel, _MAX_FIRST_BYTES)
    if message is None:
        return
    first, _ = message
    end_after(float(first["ttl_s"]))
    try:
        enter()
    except OSError as error:
        channel.sendall(wire.pack({"error": str(error)}))
        return
    facts = read_back()
    box = supervisor.Supervisor(
        channel,
        limits=first["limits"],
        work="/box",
        scratch="/tmp",
        isolated=True,
        counts_user=False,
        oom_events_fd=None if _has_memory_group(facts) else -1,
    )
    box.prepare()
    channel.sendall(wire.pack({"ready": True, "facts": facts}))
    box.serve()


def _has_memory_group(facts: dict[str, Any]) -> bool:
    """Whether the group seen here is this container's: without a limit it may be the host's."""
    value = facts["cgroup"].get("memory", [0, "max"])[1]
    return value.isdigit() and int(value) < _NO_LIMIT_BYTES


def end_after(ttl_s: float) -> None:
    """End this process, and so the container, when its time is over, whoever still holds it."""
    ends_at = time.monotonic() + ttl_s

    def expire(*_: object) -> None:
        if time.monotonic() >= ends_at:  # the program inside can send the signal, too
            os._exit(EXPIRED)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, ttl_s + 0.01)


def enter() -> None:
    """Give up what the engine left us."""
    os.chdir("/box")
    kernel.drop_privileges()
    kernel.install_seccomp(seccomp.build_filter(platform.machine()))
    kernel.set_dumpable(False)


def read_back() -> dict[str, Any]:
    """What the kernel says of this container, with the limits of its control groups."""
    facts = zygote.read_back()
    facts["cgroup"] = {}
    for name, candidates in _CGROUP_FILES.items():
        for version, path in zip((2, 1), candidates):  # noqa: B905 - `strict` is newer than 3.9
            try:
                with open("/sys/fs/cgroup/" + path) as file:
                    facts["cgroup"][name] = [version, file.read().strip()]
                break
            except OSError:
                continue
    with open("/proc/net/dev") as devices:
        facts["interfaces"] = [line.split(":")[0].strip() for line in devices if ":" in line]
    return facts
