"""Forking the untrusted processes of a box: interpreters and commands, each under its limits."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from typing import Any

from . import capture, interpreter, kernel, wire

_MAX_FILES = 256
# The kernel refuses at twice the limit and a few of our own; the supervisor kills at the limit.
# With the same number for both, a bomb that the kernel holds just below it would go unseen.
_OWN_PROCESSES = 4
_MAX_PRIVATE_BYTES = 24 << 20
# A report is JSON made of what fits the output limit and an error; a character takes up to 12.
_REPORT_FACTOR, _LEAST_REPORT_BYTES = 12, 1 << 18
# As in the kernel's own crash handling: a limit of 0 bytes would still start a handler that the
# host has set, one of 1 byte never does.
_NO_CORE = 1
_FIRST_TO_GO = b"1000"


class NoRoom(Exception):
    """The box is full of processes: the kernel lets it have no other one."""


class Child:
    """One untrusted process with its pipes; `reports` is None for a plain command."""

    def __init__(
        self,
        pid: int,
        out: capture.Capture,
        err: capture.Capture,
        reports: capture.Reports | None,
        feeder: capture.Feeder | None = None,
    ) -> None:
        self.pid = pid
        self.out = out
        self.err = err
        self.reports = reports
        self.feeder = feeder
        self.used = False

    def ask(self, request: dict[str, Any], body: bytes) -> None:
        """Start sending a request to an interpreter; `Reports.transfer` sends the rest."""
        if self.reports is None:
            raise TypeError("a plain command takes no requests")
        self.reports.expected += 1
        numbered = {**request, "number": self.reports.expected}
        self.reports.unsent = memoryview(wire.pack(numbered, body))
        self.reports.transfer()

    def close(self) -> None:
        """Close our ends of its pipes."""
        os.close(self.out.fd)
        os.close(self.err.fd)
        if self.feeder is not None and self.feeder.fd >= 0:
            self.feeder.finish()
        if self.reports is not None:
            self.reports.sock.close()


def fork_interpreter(limits: dict[str, Any], work: str, counts_user: bool) -> Child:
    """Fork an interpreter that waits for its first request."""
    ours, theirs = socket.socketpair()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    pid = _fork(out_read, out_write, err_read, err_write)
    if pid == 0:
        try:
            channel_fd = _MAX_FILES - 1  # high, so that the program's files start at 3 as usual
            _become_child(0, out_write, err_write, theirs.fileno(), channel_fd, work)
            limit_resources(limits, counts_user)
            # Until its first cell, other processes of the box cannot open its /proc entries, and
            # a private program stays like that: nobody else writes to its memory or channel.
            kernel.set_dumpable(False)
            interpreter.serve(socket.socket(fileno=channel_fd), int(limits["output_bytes"]))
        finally:
            os._exit(70)
    for fd in (out_write, err_write):
        os.close(fd)
    theirs.close()
    keep = int(limits["output_bytes"])
    return Child(
        pid,
        capture.Capture(out_read, keep),
        capture.Capture(err_read, keep),
        capture.Reports(ours, _LEAST_REPORT_BYTES + _REPORT_FACTOR * keep, _MAX_PRIVATE_BYTES),
    )


def fork_command(
    argv: list[str], stdin: bytes, limits: dict[str, Any], work: str, counts_user: bool
) -> Child:
    """Fork and execute a command."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    pid = _fork(in_read, in_write, out_read, out_write, err_read, err_write)
    if pid == 0:
        try:
            _become_child(in_read, out_write, err_write, -1, -1, work)
            limit_resources(limits, counts_user)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)  # Python ignores them, programs should not
            os.execvp(argv[0], argv)
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            os.write(2, f"{argv[0]}: {reason}\n".encode("utf-8", "backslashreplace"))
        finally:
            os._exit(127)
    for fd in (in_read, out_write, err_write):
        os.close(fd)
    keep = int(limits["output_bytes"])
    return Child(
        pid,
        capture.Capture(out_read, keep),
        capture.Capture(err_read, keep),
        None,
        capture.Feeder(in_write, stdin, close_when_done=True),
    )


def _fork(*pipes: int) -> int:
    """Fork; close the pipes that were meant for the child where there is no room for one."""
    try:
        return kernel.fork_into(0)
    except OSError as error:
        for fd in pipes:
            os.close(fd)
        raise NoRoom(str(error)) from None


def forbid_core_dumps() -> None:
    """Keep a crash of this process and its children from the host's core files and handler."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 0 if most == 0 else _NO_CORE
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def limit_resources(limits: dict[str, Any], counts_user: bool) -> None:
    """Set the limits of this process and its children; none can be raised again."""
    memory = int(limits["memory_mb"]) << 20
    disk = int(limits["disk_mb"]) << 20
    cpu = max(1, int(limits["cpu_s"] + 0.999))
    hard = [
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_NOFILE, _MAX_FILES, _MAX_FILES),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
    ]
    forbid_core_dumps()
    if counts_user:  # elsewhere it would count processes that are none of ours
        processes = 2 * int(limits["max_processes"]) + _OWN_PROCESSES
        hard.append((resource.RLIMIT_NPROC, processes, processes))
        hard.append((resource.RLIMIT_MEMLOCK, 0, 0))
    for which, soft, ceiling in hard:
        resource.setrlimit(which, (soft, ceiling))


def _become_child(
    stdin: int, stdout: int, stderr: int, channel: int, channel_fd: int, work: str
) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.chdir(work)
    # Sources may have any number; lift them out of the way of their targets first.
    stdin, stdout, stderr = (os.dup(fd) for fd in (stdin, stdout, stderr))
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    if channel >= 0:
        os.dup2(channel, channel_fd, inheritable=False)
        os.closerange(3, channel_fd)
        os.closerange(channel_fd + 1, 1 << 20)
    else:
        os.closerange(3, 1 << 20)
    kernel.set_dumpable(True)
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, _FIRST_TO_GO)  # where memory runs out, this goes before whoever watches it
        os.close(fd)
