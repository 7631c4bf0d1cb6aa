"""The trusted parent of all boxes: one small process that forks a fresh interpreter per box.

A start costs Python's start-up once; a box then costs a fork into new user, pid and mount
namespaces. The zygote never runs untrusted code and never reads from a box. It keeps one end of
every box's channel open until it has reaped the box's first process, and with that every process
of the box: the host's end-of-file on the channel therefore means "all dead", and the GOODBYE
before it means "the zygote lives and saw it".

Control messages (one JSON object per datagram, on a SOCK_SEQPACKET socket):
``{"op": "create", "id", "limits", "probe", "joins", "events"}`` and ``{"op": "kill", "id"}``.
With the first come descriptors: the channel, ``joins`` files through which the box enters its
control groups, and, where ``events`` is true, the file in which its memory group counts kills.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import resource
import select
import signal
import socket
import sys
import traceback
from typing import Any

from . import children, interpreter, kernel, seccomp, supervisor, wire

# What programs import most, loaded once and shared by every box through copy-on-write. Each
# module also makes every fork a little dearer, so the list stops where use becomes rare.
_PRELOADED = (
    *("ast", "bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools"),
    *("json", "math", "operator", "random", "re", "string", "typing"),
)

_CHANNEL_FD, _EVENTS_FD = 3, 4
_MOST_FDS = 4
_WARM_CELLS = 10


class Zygote:
    """Creates, kills and reaps boxes until the host closes the control socket."""

    def __init__(self, control: socket.socket, program: bytes) -> None:
        self._control = control
        # Asked here: in a new user namespace they read as nobody until they are mapped.
        self._ids = os.getuid(), os.getgid()
        self._program = program
        self._pid_of: dict[int, int] = {}
        self._box_of: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> None:
        """Run until the control socket ends."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        self._control.send(b'{"ready": true}')
        while True:
            for fd, _ in poll.poll():
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                elif not self._handle_message():
                    return

    def _handle_message(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, 65536, _MOST_FDS)
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "create":
            if len(fds) == 1 + message["joins"] + message["events"]:
                self._create(message, socket.socket(fileno=fds.pop(0)), fds)
            for fd in fds:  # not all came if none was left here: the host sees its channel end
                os.close(fd)
        else:
            pid = self._pid_of.get(message["id"])
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        return True

    def _create(self, message: dict[str, Any], channel: socket.socket, groups: list[int]) -> None:
        try:
            pid = kernel.fork_into(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
        except OSError as error:
            self._farewell(channel, wire.pack({"error": f"no box could be forked: {error}"}))
            return
        if pid == 0:
            run_box(channel, message, groups, self._program, self._ids)
        self._pid_of[message["id"]] = pid
        self._box_of[pid] = (message["id"], channel)

    def _reap(self) -> None:
        while self._box_of:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._box_of:
                box_id, channel = self._box_of.pop(pid)
                del self._pid_of[box_id]
                self._farewell(channel, b"")

    def _farewell(self, channel: socket.socket, last_words: bytes) -> None:
        with contextlib.suppress(OSError):  # the host may have closed its end first
            # Not by a flag of the socket, which the box's own end would share.
            channel.send(last_words + wire.GOODBYE, socket.MSG_DONTWAIT)
        channel.close()


def run_box(
    channel: socket.socket,
    message: dict[str, Any],
    groups: list[int],
    program: bytes,
    ids: tuple[int, int],
) -> None:
    """Become the first process of a box; never returns."""
    exit_code = 1
    try:
        for fd in groups[: message["joins"]]:
            os.write(fd, b"0")  # ourselves, before anything of the box exists
        lifted = [os.dup(fd) for fd in (channel.fileno(), *groups[message["joins"] :])]
        for target, fd in enumerate(lifted, _CHANNEL_FD):
            os.dup2(fd, target)
        events_fd = _EVENTS_FD if message["events"] else None
        # Nothing of the zygote or of other boxes stays open in here.
        os.closerange(_CHANNEL_FD + len(lifted), 1 << 20)
        channel.detach()
        channel = socket.socket(fileno=_CHANNEL_FD)
        try:
            prepare_box(message["limits"], program, ids)
        except (OSError, ValueError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{error} (in {where.name}: {where.line})"
            channel.sendall(wire.pack({"error": reason}))
        else:
            hello = {"ready": True, "facts": read_back() if message["probe"] else {}}
            box = supervisor.Supervisor(
                channel,
                limits=message["limits"],
                work="/box",
                scratch="/tmp",
                isolated=True,
                counts_user=True,
                oom_events_fd=events_fd,
            )
            box.prepare()
            channel.sendall(wire.pack(hello))
            box.serve()
            exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def prepare_box(limits: dict[str, Any], program: bytes, ids: tuple[int, int]) -> None:
    """Mount the box's own file systems, then give up every right that allowed it."""
    signal.set_wakeup_fd(-1)
    # Where sessions are scheduled as groups, a box has its share of the processors, however many
    # processes another one has.
    os.setsid()
    kernel.map_own_user(*ids)
    # Inodes cost kernel memory that the size limit does not count.
    size = f"size={limits['disk_mb']}m,nr_inodes=8192"
    kernel.mount("tmpfs", "/box", size + ",mode=0700")
    kernel.mount("tmpfs", "/tmp", size + ",mode=1777")
    # Only process entries: the host's command line, memory and settings stay out of sight.
    kernel.mount("proc", "/proc", "subset=pid")
    os.chdir("/box")
    kernel.drop_privileges()
    children.forbid_core_dumps()  # the filter freezes this limit
    kernel.install_seccomp(program)
    kernel.set_dumpable(False)


def read_back() -> dict[str, Any]:
    """What the kernel says of this process: the report's evidence."""
    with open("/proc/self/status") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    with open("/proc/self/mounts") as mounts:
        own = [line.split() for line in mounts]
    return {
        "seccomp": fields.get("Seccomp"),
        "no_new_privs": fields.get("NoNewPrivs"),
        "capabilities": fields.get("CapEff"),
        "bounding": fields.get("CapBnd"),
        "pid": os.getpid(),
        "uid": os.getuid(),
        "namespaces": {
            name: os.readlink(f"/proc/self/ns/{name}")
            for name in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
            if os.path.lexists(f"/proc/self/ns/{name}")  # gVisor shows some only
        },
        "mounts": {entry[1]: entry[2:4] for entry in own},
        "python": platform.python_version(),
    }


def warm_up_supervisor() -> None:
    """Serve a few cells right here: what the supervisor's code caches is then shared by boxes."""
    host, channel = socket.socketpair()
    limits = {
        **{"memory_mb": 1 << 20, "disk_mb": 1 << 10, "cpu_s": 10, "max_processes": 1 << 10},
        "output_bytes": 1024,
    }
    box = supervisor.Supervisor(
        channel, limits=limits, work="/", scratch="/tmp", isolated=False, counts_user=False
    )
    box.prepare()
    for _ in range(_WARM_CELLS):
        host.sendall(wire.pack({"op": "cell", "timeout_s": 5}, b"1 + 1"))
    host.shutdown(socket.SHUT_WR)
    box.serve()
    host.close()
    channel.close()


def main() -> None:
    """Entry point: the control socket's descriptor is the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # one descriptor per box
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _PRELOADED:
        __import__(name)
    program = seccomp.build_filter(platform.machine())
    # Our own folder must not shadow a module that a program brings along.
    sys.path[:] = [entry for entry in sys.path if entry and not entry.startswith("/agentrl")]
    kernel.load_seccomp(program)
    interpreter.warm_up()
    warm_up_supervisor()
    gc.collect()
    gc.freeze()  # keeps the collector from copying shared pages in every box
    Zygote(control, program).serve()
