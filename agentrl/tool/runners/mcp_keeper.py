"""A program that runs another one which must not outlive whoever started it.

    python -I -S mcp_keeper.py OWNER_PID MAX_LINE_BYTES PROGRAM ARGUMENT...

It ends every process below it when the owner dies (however that happens), when the program ends,
and on SIGTERM; processes that left the session are found too: orphans below come to the keeper.
Lines of the program's output are passed on. One that is too long to be read safely is answered in
its place as a failed request of JSON-RPC. Imports nothing beyond the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 2.0
_REQUEST_ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"\\]{0,200}")')
_TOO_LONG = (
    b'{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":'
    b'"the answer is longer than %d bytes; ask for less"}}\n'
)


def main(owner_pid: int, max_line: int, command: list[str]) -> int:
    """Run a program to its end; return its exit status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != owner_pid:  # it died before the request was in place
        return 1
    output, inner = os.pipe()
    child = os.fork()
    if child == 0:
        _become(command, inner)
    os.close(inner)
    os.close(0)
    relay = Relay(max_line)
    status = None
    while status is None:
        ready, _, _ = select.select([output, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
            status = _reaped(child)
        if output in ready and not relay.pass_on(output) and status is None:
            _, status = os.waitpid(child, 0)
    os.set_blocking(output, False)
    while relay.pass_on(output):
        pass
    kill_all()
    return os.waitstatus_to_exitcode(status) & 0xFF


class Relay:
    """Passes lines on to standard output, except the overlong."""

    def __init__(self, max_line: int) -> None:
        self._max_line = max_line
        self._line = b""
        self._skipping = False

    def pass_on(self, source: int) -> bool:
        """Pass on what can be read; return whether there may be more."""
        try:
            chunk = os.read(source, 65536)
        except BlockingIOError:
            return False
        if not chunk:
            return False
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._extend(line)
            if not self._skipping:
                self._pass(self._line + b"\n")
            self._line, self._skipping = b"", False
        self._extend(rest)
        return True

    def _extend(self, part: bytes) -> None:
        if not self._skipping:
            self._line += part
            if len(self._line) > self._max_line:
                self._refuse()

    @staticmethod
    def _pass(line: bytes) -> None:
        if line.lstrip().startswith((b"{", b"[")):
            _write(1, line)
        else:  # no message: what a program prints by mistake
            _write(2, line)

    def _refuse(self) -> None:
        found = _REQUEST_ID.search(self._line[:4096])
        if found is None:
            _write(2, b"a message without id is longer than %d bytes\n" % self._max_line)
            _end()
        else:
            _write(1, _TOO_LONG % (found.group(1), self._max_line))
        self._line, self._skipping = b"", True


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BrokenPipeError:
            _end()


def _become(command: list[str], output: int) -> None:
    """Turn this child into the program."""
    keeper = os.getppid()
    os.dup2(output, 1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _reaped(child: int) -> int | None:
    """Reap what has ended; return the status of the program if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _end(*_: object) -> None:
    kill_all()
    os._exit(143)


def kill_all() -> None:
    """Kill every process below this one."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        below = _descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reaped(-1)
        if not below:
            return
        time.sleep(0.005)


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            parents[int(name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
