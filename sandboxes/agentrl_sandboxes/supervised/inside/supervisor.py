"""The first process of a box: trusted, runs no untrusted code, serves the host's requests.

It forks the interpreter that runs the cells, watches output, time, memory and process count, and
kills everything else in the box when one of them passes its limit; it survives that and starts a
fresh interpreter. What it hears from an interpreter is relayed as bytes and never interpreted
beyond its length: the program may have forged it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import Any

from . import census, children, files, kernel, wire

_TICK_S = 0.05
_SOFT_GRACE_S = 1.0
_SETTLE_S = 0.05
_IDLE_CHECK_S = 0.2
_MAX_REQUEST_BYTES = 1 << 30  # the host is trusted; this only catches a lost frame boundary
_FLOOD_FACTOR = 64
_LEAST_FLOOD_BYTES = 1 << 20


class HostGone(Exception):
    """The host closed its end: the box ends."""


class Supervisor:
    """Serves one box over its channel until the host closes it.

    Args:
        channel: blocking stream to the host.
        limits: the fields of `SandboxLimits` as a dict.
        work: the work directory; scratch: the scratch directory.
        isolated: True where this process is number 1 of a pid namespace of its own.
        counts_user: True where no process outside the box has the user id of those inside, so
            that the kernel can hold it to a number of processes.
        oom_events_fd: see :class:`census.OomKills`.
    """

    def __init__(
        self,
        channel: wire.Stream,
        *,
        limits: dict[str, Any],
        work: str,
        scratch: str,
        isolated: bool,
        counts_user: bool,
        oom_events_fd: int | None = None,
    ) -> None:
        self._channel = channel
        self._limits = limits
        self._work = work
        self._scratch = scratch
        self._isolated = isolated
        self._counts_user = counts_user
        self._oom_kills = census.OomKills(watch=isolated, events_fd=oom_events_fd)
        self._flood_bytes = max(_LEAST_FLOOD_BYTES, int(limits["output_bytes"]) * _FLOOD_FACTOR)
        self._wake_read, self._wake_write = os.pipe()
        self._ended: dict[int, int] = {}
        self._children: list[children.Child] = []
        self._interpreter: children.Child | None = None
        self._left_behind = False
        self._lost_state = False

    def prepare(self) -> None:
        """Set signals up and fork the first interpreter, so that a request finds it ready."""
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        kernel.report_no_stops()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._interpreter = self._fork_interpreter()

    def serve(self) -> None:
        """Answer requests until the host closes the channel."""
        try:
            while True:
                self._wait_for_request()
                message = wire.receive(self._channel, _MAX_REQUEST_BYTES)
                if message is None:
                    return
                self._answer(*message)
                if self._interpreter is None:
                    with contextlib.suppress(children.NoRoom):  # then once it is needed
                        self._interpreter = self._fork_interpreter()
        except HostGone:
            return
        finally:
            self._kill_all()

    def _fork_interpreter(self) -> children.Child:
        child = children.fork_interpreter(self._limits, self._work, self._counts_user)
        self._children.append(child)
        return child

    def _wait_for_request(self) -> None:
        """Wait; meanwhile reap orphans and hold background processes to the limits."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        background = self._left_behind
        while True:
            events = dict(poll.poll(_IDLE_CHECK_S * 1000 if background else None))
            if self._channel.fileno() in events:
                return
            self._reap()
            if background and self._breach() is not None:
                self._lose_everything()
                background = False
            background = background and not self._hold_still()

    def _answer(self, request: dict[str, Any], body: bytes) -> None:
        op = request["op"]
        try:
            if op == "cell":
                self._run_cell(request, body)
            elif op == "private":
                self._run_private(request, body)
            elif op == "exec":
                child = children.fork_command(
                    request["argv"], body, self._limits, self._work, self._counts_user
                )
                self._children.append(child)
                self._run_and_reply(child, request, soft=False)
            elif op == "read":
                limit = int(self._limits["disk_mb"]) << 20
                data = files.read(request["path"], self._work, self._scratch, limit)
                self._channel.sendall(wire.pack({}, data))
            elif op == "write":
                files.write(request["path"], body, self._work, self._scratch)
                self._channel.sendall(wire.pack({}))
        except files.Refused as error:
            self._channel.sendall(wire.pack({"refused": str(error)}))
        except children.NoRoom:  # a bomb that was quicker than the checks between calls
            self._lose_everything()
            self._reply("pids_limit", None, 0.0)

    def _run_cell(self, request: dict[str, Any], body: bytes) -> None:
        self._reap()
        if self._interpreter is not None and self._interpreter.pid in self._ended:
            self._lose_everything()  # it died between two calls
        child = self._interpreter = self._interpreter or self._fork_interpreter()
        child.used = True
        if self._isolated:
            os.kill(child.pid, signal.SIGCONT)
        child.ask({"op": "cell"}, body)
        self._run_and_reply(child, request, soft=True)

    def _run_private(self, request: dict[str, Any], body: bytes) -> None:
        """Run in an interpreter that no cell has touched, and end it afterwards."""
        child = self._interpreter
        if child is None or child.used or child.pid in self._ended:
            child = self._fork_interpreter()
        else:
            self._interpreter = None
        child.ask({"op": "private", "payload_bytes": request["payload_bytes"]}, body)
        self._run_and_reply(child, request, soft=False)

    def _lose_everything(self) -> None:
        """Kill all processes; remember to say so if a cell's names went with them."""
        if self._interpreter is not None and self._interpreter.used:
            self._lost_state = True
        self._kill_all()
        self._oom_kills.grew()  # what the kernel did meanwhile is no fault of the next call
        for child in self._children:
            child.close()
        self._children.clear()
        self._interpreter = None
        self._ended.clear()

    def _run_and_reply(self, child: children.Child, request: dict[str, Any], soft: bool) -> None:
        """Watch a child through one request and answer the host."""
        start = time.monotonic()
        verdict = self._watch(child, start + float(request["timeout_s"]), soft)
        self._left_behind = self._isolated and not self._hold_still()
        if verdict == "done" and self._left_behind:
            verdict = self._settle() or verdict
        if verdict == "done" and self._oom_kills.grew():
            verdict = "oom"  # the kernel was quicker than our counting
        child.out.drain(self._flood_bytes)
        child.err.drain(self._flood_bytes)
        report, private = child.reports.take() if child.reports else (b"", b"")
        exit_code = None
        if child.pid in self._ended:
            exit_code = os.waitstatus_to_exitcode(self._ended[child.pid])
        died = child is self._interpreter and exit_code is not None
        stdout, stdout_cut = child.out.take()
        stderr, stderr_cut = child.err.take()
        if died or verdict not in ("done", "interrupted"):
            self._lose_everything()
        parts, cut = (stdout, stderr, report, private), (stdout_cut, stderr_cut)
        self._reply(verdict, exit_code, time.monotonic() - start, parts, cut)
        if child in self._children and child is not self._interpreter:
            self._discard(child)

    def _reply(
        self,
        verdict: str,
        exit_code: int | None,
        duration_s: float,
        parts: tuple[bytes, ...] = (b"",) * 4,
        cut: tuple[int, int] = (0, 0),
    ) -> None:
        """Tell the host how an execution ended; the parts are output, report and private data."""
        header = {
            "verdict": verdict,
            "exit_code": exit_code,
            "state_lost": self._lost_state,
            "lengths": [len(part) for part in parts],
            "cut": cut,
            "duration_s": duration_s,
        }
        self._lost_state = False
        self._channel.sendall(wire.pack(header, b"".join(parts)))

    def _discard(self, child: children.Child) -> None:
        """End a child of one request, and its process group; the interpreter keeps its state."""
        _signal_group(child.pid)
        if self._ended.pop(child.pid, None) is None:
            os.waitpid(child.pid, 0)
        child.close()
        self._children.remove(child)

    def _watch(self, child: children.Child, deadline: float, soft: bool) -> str:
        """Serve the child's pipes until it reports, ends, or passes a limit; say which."""
        kill_at = deadline + (_SOFT_GRACE_S if soft else 0.0)
        next_check = time.monotonic() + _TICK_S
        interrupted = False
        while True:
            # A quick answer may have come with the request's own transfer: never wait for it.
            if child.reports is None or child.reports.report is None:
                self._pump(child, min(next_check, deadline if not interrupted else kill_at))
            if child.out.total > self._flood_bytes or child.err.total > self._flood_bytes:
                return "output_limit"
            if child.reports is not None and child.reports.overflow:
                return "output_limit"
            if child.reports is not None and child.reports.out_of_turn:
                return "out_of_turn"
            if child.reports is not None and child.reports.report is not None:
                return "interrupted" if interrupted else "done"
            if child.pid in self._ended:
                if child.reports is not None:
                    child.reports.transfer()
                return "done"
            now = time.monotonic()
            if now >= kill_at:
                return "timeout"
            if now >= deadline and not interrupted:
                interrupted = True
                os.kill(child.pid, signal.SIGALRM)
            if now >= next_check:
                next_check = now + _TICK_S
                breach = self._breach() if self._isolated else None
                if breach is not None:
                    return breach

    def _pump(self, child: children.Child, until: float) -> None:
        """Wait for one round of events at most until then, and move bytes."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._channel, select.POLLRDHUP)
        for pipe in (child.out, child.err):
            if pipe.open:
                poll.register(pipe.fd, select.POLLIN)
        reports = child.reports if child.reports is not None and child.reports.open else None
        if reports is not None:
            poll.register(reports.sock, select.POLLIN | (select.POLLOUT if reports.unsent else 0))
        feeder = child.feeder if child.feeder is not None and child.feeder.pending else None
        if feeder is not None:
            poll.register(feeder.fd, select.POLLOUT)
        events = dict(poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1))
        if self._channel.fileno() in events:
            raise HostGone
        if self._wake_read in events:
            self._reap()
        for pipe in (child.out, child.err):
            if pipe.open and pipe.fd in events:
                pipe.read_some()
        if feeder is not None and feeder.fd in events:
            feeder.write_some()
        if reports is not None and reports.sock.fileno() in events:
            reports.transfer()

    def _breach(self) -> str | None:
        """Which limit the processes of this box exceed together, if any."""
        pids = census.others()
        if census.count_tasks(pids) > int(self._limits["max_processes"]) + 1:
            return "pids_limit"
        if self._oom_kills.grew():
            return "oom"
        limit_bytes = int(self._limits["memory_mb"]) << 20
        return "oom" if census.memory_bytes(pids, limit_bytes) > limit_bytes else None

    def _hold_still(self) -> bool:
        """Stop the interpreter until its next cell if nothing else runs; say whether nothing does.

        A timer, or a program that forged its report, would else go on unwatched between calls.
        What has threads or has left processes behind goes on, and is checked meanwhile.
        """
        idle = self._interpreter
        if idle is None or not idle.used or idle.pid in self._ended:
            return self._count_strays() <= 0
        os.kill(idle.pid, signal.SIGSTOP)
        if self._count_strays() <= 0 and census.count_threads(idle.pid) <= 1:
            return True
        os.kill(idle.pid, signal.SIGCONT)
        return False

    def _count_strays(self) -> int:
        """Processes in the box that this supervisor did not fork itself."""
        return len(census.others()) - sum(c.pid not in self._ended for c in self._children)

    def _settle(self) -> str | None:
        """Look again at what a call left behind: a fork bomb needs a moment to show.

        One that needs longer is met by the checks between calls.
        """
        end = time.monotonic() + _SETTLE_S
        while time.monotonic() < end:
            self._reap()
            breach = self._breach()
            if breach is not None or self._count_strays() == 0:
                return breach
            time.sleep(_SETTLE_S / 5)
        return None

    def _reap(self) -> None:
        """Collect every process that ended; forget those that are not ours to report."""
        # Once: a program that floods us with signals would keep a loop here busy for ever.
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if any(child.pid == pid for child in self._children):
                self._ended[pid] = status

    def _kill_all(self) -> None:
        """Kill every process of the box but this one, and reap them all."""
        if self._isolated and os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # the whole pid namespace, never the caller
        else:
            for child in self._children:
                if child.pid not in self._ended:
                    _signal_group(child.pid)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _signal_group(pid: int) -> None:
    """Kill a child and what stayed in its process group (it made itself the leader)."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
