"""Hostile programs: every limit holds and has its status, and the host looks as before.

One test per kind of attack, with several programs of the kind, against each sandbox that can be
attacked on this machine. (The stand-in for E2B cannot: what it runs is not isolated.) After each
program an ordinary one runs within a second: in the same box where that survives, and in a fresh
one. After each test, what can be listed of the host is the same as before.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_state import HostState, list_host, restored, settled
from sandbox_arms import StartedBackend

from agentrl.errors import SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxLimits, SandboxStatus

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("backend", ["local", "docker", "http"], indirect=True),
]

LIMITS = SandboxLimits(wall_s=4.0, memory_mb=128, max_processes=16, disk_mb=8)
NEXT_S = 1.0
SOAK = os.environ.get("AGENTRL_SOAK") == "1"
OK, ERROR, TIMEOUT = SandboxStatus.OK, SandboxStatus.ERROR, SandboxStatus.TIMEOUT
OOM, PIDS_LIMIT = SandboxStatus.OOM, SandboxStatus.PIDS_LIMIT
OUTPUT_LIMIT, STATE_LOST = SandboxStatus.OUTPUT_LIMIT, SandboxStatus.STATE_LOST

# Connections that a client keeps for the next request; the local backend has none.
KEPT_CONNECTIONS = {"local": 0, "docker": 12, "http": 12}


class Arena:
    """A backend under attack, and how the host looked before."""

    def __init__(self, arm: StartedBackend) -> None:
        self.arm = arm
        self.settle(LIMITS)

    def settle(self, limits: SandboxLimits) -> None:
        """Take the host as it is now for the state to be restored."""

        async def use_some() -> HostState:
            # Every process of a server holds boxes of these limits in reserve from now on.
            boxes = await asyncio.gather(*(self.open(limits) for _ in range(8)))
            await asyncio.gather(*(box.close() for box in boxes))
            return await settled(self._list)

        self._before = self.arm.run(use_some())
        self._sockets = list_host(self.arm).descriptors.get("socket", 0)

    def check_host(self) -> None:
        """What can be listed of the host must be as before, or become so soon."""
        assert self.arm.run(restored(self._list, self._before)) == {}
        grown = list_host(self.arm).descriptors.get("socket", 0) - self._sockets
        assert grown <= KEPT_CONNECTIONS[self.arm.name]

    def _list(self) -> HostState:
        state = list_host(self.arm)
        if KEPT_CONNECTIONS[self.arm.name]:
            state.descriptors = {}
        return state

    async def open(self, limits: SandboxLimits = LIMITS) -> Sandbox:
        return await self.arm.backend.create(limits)

    async def check_next(self, box: Sandbox) -> None:
        """An ordinary cell must be answered right, within a deadline."""
        async with asyncio.timeout(NEXT_S):
            after = await box.run_code("1 + 1", timeout_s=NEXT_S)
        assert (after.status, after.result) == (OK, "2"), after

    def attack(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run one hostile cell; the box, and a fresh one, must answer ordinary ones next."""

        async def scenario() -> ExecResult:
            box = await self.open()
            try:
                hostile = await box.run_code(code, timeout_s=timeout_s)
                if hostile.status is not SandboxStatus.SANDBOX_DEAD:
                    await self.check_next(box)
            finally:
                await box.close()
            fresh = await self.open()
            try:
                await self.check_next(fresh)
            finally:
                await fresh.close()
            return hostile

        return self.arm.run(scenario())

    def value(self, code: str) -> object:
        """The value of a cell that must run through: what it got hold of, in plain literals."""
        result = self.attack(code)
        assert result.status is OK, result
        return eval(result.result or "None")


@pytest.fixture(scope="module")
def settled_arena(backend: StartedBackend) -> Arena:
    """The backend with its reserve of boxes, and how the host looks with that."""
    return Arena(backend)


@pytest.fixture
def arena(settled_arena: Arena) -> Iterator[Arena]:
    """The backend under attack; the host must look after the test as it did before."""
    yield settled_arena
    settled_arena.check_host()


# A1: processes

BOMBS = {
    "shell": "import shutil, subprocess\n"
    "bomb = {'bash': ':(){ :|:& };:; sleep 9', 'sh': 'while :; do sleep 99 & done'}\n"
    "for shell in filter(shutil.which, bomb): subprocess.run([shell, '-c', bomb[shell]])",
    "python": "import os\nwhile True: os.fork()",
    "sleepers": "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(99)",
    "threads": "import threading, time\n"
    "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "detached": "import os, time\nwhile True:\n    if os.fork() == 0: os.setsid(); time.sleep(99)",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_fork_bomb_hits_the_limit_and_dies_whole(arena, bomb):
    assert arena.attack(BOMBS[bomb]).status is PIDS_LIMIT


BETWEEN_CALLS = {
    "a process that goes on": """
import os
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        while True:
            try: os.fork()
            except OSError: pass
""",
    "a thread that wakes up": """
import os, threading, time
def later():
    time.sleep(0.1)
    while True:
        try:
            if os.fork() == 0: time.sleep(99)
        except OSError: pass
threading.Thread(target=later, daemon=True).start()
""",
}


@pytest.mark.parametrize("bomb", BETWEEN_CALLS)
def test_a_bomb_that_goes_off_between_calls_is_found_and_dies_whole(arena, bomb):
    async def scenario():
        box = await arena.open()
        results = [await box.run_code(BETWEEN_CALLS[bomb])]
        while not (results[-1].state_lost or results[-1].status is PIDS_LIMIT):
            await asyncio.sleep(0.3)
            results.append(await box.run_code("1"))
        await arena.check_next(box)
        left = await box.run_code("sum(p.isdigit() for p in __import__('os').listdir('/proc'))")
        await box.close()
        return left.result

    assert arena.arm.run(scenario()) == "2"


def test_a_timer_of_a_cell_does_not_run_between_calls(arena):
    code = """
import signal, time
beats = []
signal.signal(signal.SIGALRM, lambda *_: beats.append(time.monotonic()))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
"""

    async def scenario():
        box = await arena.open()
        await box.run_code(code)
        await asyncio.sleep(0.5)
        counted = await box.run_code("len(beats)")
        await box.close()
        return int(counted.result or 99)

    assert arena.arm.run(scenario()) < 10


# A2, A3: memory

HOGS = {
    "appending": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "at once": "kept = b'x' * (10 << 30)",
    "small maps": "import mmap\nkept = []\nwhile True:\n"
    "    try: kept.append(mmap.mmap(-1, 1 << 16))\n"
    "    except OSError: raise MemoryError from None",
    "spread over processes": "import os, time\nfor _ in range(8):\n"
    "    if os.fork() == 0: kept = bytearray(60 << 20); time.sleep(60)\ntime.sleep(60)",
    "a shared map": "import mmap, os, time\nfor _ in range(4):\n"
    "    shared = mmap.mmap(-1, 60 << 20)\n"
    "    if os.fork() == 0:\n"
    "        for at in range(0, 60 << 20, 4096): shared[at] = 1\n"
    "        time.sleep(60)\n    shared.close()\ntime.sleep(60)",
}


@pytest.mark.parametrize("hog", HOGS)
def test_memory_is_bounded_whatever_asks_for_it(arena, hog):
    assert arena.attack(HOGS[hog]).status is OOM


def test_memory_that_no_limit_of_a_process_counts_is_refused_or_bounded(arena):
    code = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
found = [libc.shmget(0, 1 << 20, 0o1600)]
try: found.append(os.memfd_create("x"))
except OSError as error: found.append(error.errno)
def fill(folder):
    try:
        with open(folder + "/big", "wb") as file:
            for _ in range(64): file.write(bytes(1 << 20))
    except OSError as error: return error.errno in (errno.ENOSPC, errno.EFBIG)
    finally: os.unlink(folder + "/big")
found + [fill(folder) for folder in ("/box", "/tmp", "/dev/shm")]
"""
    assert arena.value(code) == [-1, 1, True, True, True]


# A4: open files, kernel memory, inodes


def test_open_files_end_with_emfile_inside(arena):
    code = """
import errno, os, socket
def exhaust(make):
    kept = []
    try:
        while True: kept.append(make())
    except OSError as error: return error.errno == errno.EMFILE
    finally:
        for pair in kept:
            for end in pair: os.close(end)
def full_pipe():
    r, w = os.pipe()
    os.set_blocking(w, False)
    try:
        while True: os.write(w, bytes(65536))
    except BlockingIOError: return r, w
def full_sockets():
    a, b = socket.socketpair(); a.setblocking(False)
    try:
        while True: a.send(bytes(65536))
    except BlockingIOError: return a.detach(), b.detach()
def one_file():
    return (os.open("x", os.O_CREAT | os.O_RDWR),)
[exhaust(make) for make in (full_pipe, full_sockets, one_file)]
"""
    assert arena.value(code) == [True, True, True]


def test_descriptors_in_flight_and_inodes_are_bounded(arena):
    code = """
import errno, os, socket
def litter():
    try:
        for n in range(100_000): open(f"/tmp/{n}", "w").close()
    except OSError as error: return error.errno == errno.ENOSPC
def send_for_ever():
    a, b = socket.socketpair(); a.setblocking(False)
    sent = 0
    try:
        while sent < 100_000:
            socket.send_fds(a, [b"x"], [a.fileno()] * 200); sent += 200
    except (BlockingIOError, OSError): return sent < 100_000
litter(), send_for_ever()
"""
    assert arena.value(code) == (True, True)


def test_what_the_kernel_counts_per_user_cannot_be_used_up(arena):
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
sum(libc.inotify_init1(0) >= 0 for _ in range(300))
"""
    assert arena.value(code) == 0


# A5: time

STUBBORN = {
    "every signal ignored": """
import os, signal
for number in range(1, 64):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
if os.fork() == 0:
    os.setsid()
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "stops all": "import os, signal\n"
    "os.fork()\nfor target in (-1, 0): os.kill(target, signal.SIGSTOP)",
    "a flood of signals": """
import os, signal
signal.signal(signal.SIGALRM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0: break
while True: os.kill(1, signal.SIGCHLD)
""",
}


@pytest.mark.parametrize("program", STUBBORN)
def test_what_does_not_stop_is_killed_with_all_it_started(arena, program):
    result = arena.attack(STUBBORN[program], timeout_s=0.3)
    assert result.status is TIMEOUT and result.state_lost


SWALLOWING = {
    "the interrupt": "try:\n    while True: pass\nexcept BaseException: pass",
    "all in one operation": "9 ** 9 ** 9",
    "a regular expression": "import re; re.match('(a*)*b', 'a' * 64)",
}


@pytest.mark.parametrize("program", SWALLOWING)
def test_what_ends_late_is_a_time_out_whatever_it_returns(arena, program):
    assert arena.attack(SWALLOWING[program], timeout_s=0.2).status is TIMEOUT


def test_cpu_time_is_bounded_also_where_the_signal_is_caught(arena):
    limits = SandboxLimits(wall_s=20, cpu_s=1, memory_mb=128, max_processes=16, disk_mb=8)
    arena.settle(limits)

    async def scenario():
        box = await arena.open(limits)
        code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
        result = await box.run_code(code)
        await arena.check_next(box)
        await box.close()
        return result.status

    assert arena.arm.run(scenario()) in (TIMEOUT, STATE_LOST)


# A6: output

FLOODS = {
    "print": "while True: print('y' * 1000)",
    "stderr": "import os\nwhile True: os.write(2, b'e' * 65536)",
    "child": "import subprocess; subprocess.run(['yes'])",
    "binary": "import os\nwhile True: os.write(1, b'\\x1b[31m\\xff\\xfe\\x80' * 9999)",
    "one line": "import sys\nwhile True: sys.stdout.write('y' * 65536)",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_cut_and_stopped_while_our_memory_stays_flat(arena, flood):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = arena.attack(FLOODS[flood], timeout_s=20)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert result.status is OUTPUT_LIMIT
    assert len(result.stdout) + len(result.stderr) < 2 * LIMITS.output_bytes + 1000
    assert result.truncated_bytes > 1_000_000
    assert f"[{result.truncated_bytes} bytes cut]" in result.stdout + result.stderr
    assert grown_kb < 64_000


def test_a_million_escapes_and_bytes_of_no_text_come_back_as_text(arena):
    result = arena.attack("print('\\x1b[0m' * 1_000_000)\nimport os; os.write(1, b'\\xff\\x00')")
    assert result.status is OK
    assert result.truncated_bytes == 4_000_001 + 2 - LIMITS.output_bytes


def test_a_bomb_and_a_flood_together_end_by_one_of_the_two_limits(arena):
    code = """
import os
while True:
    try: os.fork()
    except OSError: pass
    os.write(1, b'y' * 65536); os.write(2, b'y' * 65536)
"""
    assert arena.attack(code, timeout_s=20).status in (PIDS_LIMIT, OUTPUT_LIMIT)


def test_an_immense_command_line_is_an_error_of_the_command(arena):
    async def scenario():
        box = await arena.open()
        many = await box.exec(["echo", *["x" * 10] * 1_000_000])
        long = await box.exec(["echo", "x" * (3 << 20)])
        await arena.check_next(box)
        await box.close()
        return many, long

    for result in arena.arm.run(scenario()):
        assert (result.status, result.exit_code) == (ERROR, 127)
        assert "too long" in result.stderr


# A7 belongs to whoever unpacks archives; what it comes down to here is A10 and A11.

# A9: files of the host


def test_the_hosts_files_are_not_there(arena):
    here = str(Path(__file__).resolve())
    paths = ["/etc/shadow", "/root/.ssh", "/home", here, "/var/log", "/etc/ssh", "/run/docker.sock"]
    if arena.arm.name != "docker":  # a container shows files of these, and they are read-only
        paths += ["/sys/kernel", "/sys/fs/cgroup"]
    code = f"""
import os
def visible(path):
    try: return bool(os.listdir(path) if os.path.isdir(path) else open(path).read(1))
    except OSError: return False
[path for path in {paths!r} if visible(path)]
"""
    assert arena.value(code) == []


# A10, A11: paths

PATHS = [
    "../../etc/passwd", "/etc/passwd", "/box/../etc/passwd", "a/../../etc/passwd", "link/passwd",
    "/proc/1/environ", "/proc/self/root/etc/passwd", "fifo", ".", "", "x" * 5000, "a\0b",
    "/tmp/../etc/passwd", "real/../../etc/passwd", "link-to-link/passwd",
]  # fmt: skip
HARMLESS = ["%2e%2e/%2e%2e/etc/passwd", "~/x", "..\\..\\etc\\passwd", "\u2215etc\u2215passwd"]


def test_no_path_leaves_the_box(arena):
    setup = """
import os
os.symlink('/etc', 'link'); os.symlink('link', 'link-to-link'); os.mkfifo('fifo'); os.mkdir('real')
"""

    async def scenario():
        box = await arena.open()
        await box.run_code(setup)
        before = await box.run_code("open('/etc/passwd').read()")
        allowed = []
        for path in PATHS:
            for use in (box.read(path), box.write(path, b"overwritten")):
                try:
                    await use
                    allowed.append(path)
                except ToolError:
                    pass
        for path in HARMLESS:  # ordinary names to a sandbox that decodes nothing
            await box.write(path, b"here")
            assert await box.read(path) == b"here"
        inside = await box.run_code(
            "sorted(os.path.join(d, f) for d, _, fs in os.walk('/box') for f in fs)"
        )
        after = await box.run_code("open('/etc/passwd').read()")
        await box.close()
        return allowed, before.result == after.result, inside.result

    allowed, unchanged, inside = arena.arm.run(scenario())
    assert (allowed, unchanged) == ([], True)
    # Nothing else was made on the way: no half-written file, no folder outside.
    assert len(eval(inside)) == 1 + len(HARMLESS)


def test_a_link_swapped_during_writes_never_leads_out(arena):
    swap = """
import os, threading
os.mkdir("real"); os.symlink("real", "d")
def swapping():
    while True:
        for target in ("/etc", "real", "../etc"):
            os.symlink(target, "new"); os.rename("new", "d")
threading.Thread(target=swapping, daemon=True).start()
"""

    async def scenario():
        box = await arena.open()
        await box.run_code(swap)
        refused = 0
        for _ in range(300):
            try:
                await box.write("d/passwd", b"swapped")
            except ToolError:
                refused += 1
        passwd = await box.run_code("open('/etc/passwd').read()")
        await box.close()
        return refused, passwd.result

    refused, passwd = arena.arm.run(scenario())
    assert refused, "the race was met at least once"
    assert passwd is not None and "swapped" not in passwd


def test_hard_links_and_devices_give_nothing(arena):
    code = """
import os, stat
def attempt(do):
    try: do(); return True
    except OSError: return False
[attempt(lambda: os.link("/etc/passwd", "/box/p")),
 attempt(lambda: os.mknod("/box/mem", 0o666 | stat.S_IFCHR, os.makedev(1, 1))),
 attempt(lambda: os.mknod("/tmp/disk", 0o666 | stat.S_IFBLK, os.makedev(8, 0))),
 attempt(lambda: open("/dev/mem", "rb"))]
"""
    assert arena.value(code) == [False] * 4


# A12: /proc


def test_the_process_tree_and_the_settings_of_the_host_are_out_of_reach(arena):
    code = """
import os
def attempt(do):
    try: return bool(do())
    except OSError: return False
reads = ["/proc/1/environ", "/proc/1/mem", "/proc/1/root/etc", "/proc/1/fd/0", "/proc/1/maps",
         "/proc/kcore", "/proc/1/cwd/x", "/proc/kallsyms", "/proc/keys", "/proc/timer_list",
         "/dev/mem", "/dev/tty", "/dev/kmsg", "/proc/cmdline", "/proc/meminfo",
         "/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/memory/release_agent"]
writes = ["/proc/sys/kernel/core_pattern", "/proc/self/exe", "/usr/bin/python3", "/etc/passwd",
          "/proc/1/oom_score_adj", "/proc/sysrq-trigger", "/new", "/dev/new", "/usr/new",
          "/proc/sys/kernel/hostname", "/sys/fs/cgroup/memory/notify_on_release",
          "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max"]
leaks = [p for p in reads if attempt(lambda: open(p, "rb").read(64))]
leaks += [p for p in writes if attempt(lambda: open(p, "wb" if p.endswith("/new") else "r+b"))]
leaks += [p for p in ("/proc/1/fd", "/proc/1/task/1/fd") if attempt(lambda: os.listdir(p))]
leaks, sum(p.isdigit() for p in os.listdir("/proc"))
"""
    assert arena.value(code) == ([], 2), "its own process and the supervisor"


# A13: leftovers


def test_boxes_share_nothing_one_after_the_other_or_side_by_side(arena):
    traces = """
import builtins, os, socket
for folder in ("/box", "/tmp", "/dev/shm"):
    open(folder + "/trace", "w").write("here")
for folder in ("/var/tmp", "/run", "/usr/lib", "/var/lock"):
    try: open(folder + "/trace", "w").write("here")
    except OSError: pass
os.environ["TRACE"] = "here"
builtins.TRACE = "here"
import multiprocessing.shared_memory as memory
memory.SharedMemory("memory", create=True, size=100)
kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def attempt(do):
    try: do()
    except OSError: pass
attempt(lambda: kept[0].bind("\\0agentrl-trace"))
attempt(lambda: kept[1].setsockopt(socket.SOL_SOCKET, 16, 1))
attempt(lambda: kept[1].send(b"now it would have a name"))
"""
    search = """
import builtins, glob, os, socket
end, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def reached(name):
    try: end.sendto(b"hello", name); return True
    except OSError: return False
([p for f in ("/box", "/tmp", "/dev/shm", "/var/tmp", "/run") for p in glob.glob(f + "/trace")],
 os.environ.get("TRACE"), hasattr(builtins, "TRACE"),
 sum(p.isdigit() for p in os.listdir("/proc")),
 reached("\\0agentrl-trace"), any(reached(f"\\0{n:05x}") for n in range(4096)))
"""

    async def scenario():
        first, second = await arena.open(), await arena.open()
        left = await first.run_code(traces)
        assert left.status is OK, left
        during = await second.run_code(search)
        await first.close()
        third = await arena.open()
        after = await third.run_code(search)
        await asyncio.gather(second.close(), third.close())
        return during.result, after.result

    for found in arena.arm.run(scenario()):
        assert found == "([], None, False, 2, False, False)"


# A14: other processes


def test_no_process_of_a_box_reaches_into_its_supervisor_or_a_sibling(arena):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
others = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
got = []
for pid in others:
    if libc.ptrace(16, pid, 0, 0) == 0: got.append(("attach", pid))
    if libc.syscall(310, pid, 0, 0, 0, 0, 0) >= 0: got.append(("read", pid))
    for entry in ("mem", "environ", "maps", "fd/0", "syscall", "stack"):
        try: open(f"/proc/{pid}/{entry}", "rb").read(1); got.append((entry, pid))
        except OSError: pass
print(len(others), got)
"""

    async def scenario():
        box = await arena.open()
        cell = await box.run_code(code)
        await box.write("attack.py", code.encode())
        fresh = await arena.open()  # in which an unused interpreter waits for a private program
        await fresh.write("attack.py", code.encode())
        command = await fresh.exec(["python3", "attack.py"])
        private = await fresh.run_private(code + "\nreply(b'mine')", b"")
        await asyncio.gather(box.close(), fresh.close())
        return cell.stdout, command.stdout, private.stdout, private.private

    cell, command, private, reply = arena.arm.run(scenario())
    assert (cell, command) == ("1 []\n", "2 []\n")
    assert private.endswith(" []\n") and reply == b"mine"


def test_signals_limits_and_priorities_do_not_reach_the_supervisor(arena):
    code = """
import os, resource, signal
hits = []
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM,
               signal.SIGHUP, signal.SIGUSR1, signal.SIGSEGV, signal.SIGRTMIN):
    os.kill(1, number)
for do in (lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)),
           lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
           lambda: os.setpriority(os.PRIO_USER, 0, 19),
           lambda: os.sched_setaffinity(1, {0}),
           lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))):
    try: do(); hits.append(do.__code__.co_names)
    except PermissionError: pass
for limit in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    soft, hard = resource.getrlimit(limit)
    try: resource.setrlimit(limit, (hard + 1, hard + 1)); hits.append(limit)
    except ValueError: pass
hits
"""
    assert arena.value(code) == []


def test_a_crash_writes_no_core_and_wakes_no_handler_of_the_host(arena):
    code = """
import os, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if (pid := os.fork()) == 0: os.abort()
resource.getrlimit(resource.RLIMIT_CORE)[1], os.WCOREDUMP(os.waitpid(pid, 0)[1]), os.listdir()
"""
    # Where a host pipes cores to a handler, only a limit of exactly 1 keeps it from starting.
    assert arena.value(code) == (1, False, [])


# A15: system calls

CALLS = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "keyctl": 250,
    "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "io_uring_setup": 425, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
    "fsopen": 430, "open_tree": 428, "move_mount": 429, "pidfd_getfd": 438, "chroot": 161,
    "pivot_root": 155, "clone3": 435, "socket": 41, "bind": 49, "connect": 42, "listen": 50,
    "kexec_load": 246, "init_module": 175, "open_by_handle_at": 304, "memfd_secret": 447,
    "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "personality": 135,
    "x32 getpid": 0x40000000 + 39,
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers and instructions of x86")
def test_dangerous_system_calls_are_refused(arena):
    code = f"""
import ctypes, errno, mmap
libc = ctypes.CDLL(None, use_errno=True)
allowed = []
for name, number in {CALLS}.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0)
    if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        allowed.append((name, result, ctypes.get_errno()))
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000):
    if libc.syscall(56, flag | 17, 0, 0, 0, 0) >= 0: allowed.append(("clone", hex(flag)))
allowed
"""
    assert arena.value(code) == []


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="an x86 instruction")
def test_the_32_bit_entry_to_the_kernel_is_closed(arena):
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
call() == -38
"""
    result = arena.attack(code)
    assert result.result == "True" or result.exit_code == -11  # no such entry in this kernel


# A16: terminals


def test_there_is_no_controlling_terminal(arena):
    code = """
import fcntl, os
def inject(fd):
    try: fcntl.ioctl(fd, 0x5412, b"x"); return True
    except OSError: return False
def terminal():
    try: return os.open("/dev/tty", os.O_RDWR)
    except OSError: return None
terminal(), [os.isatty(fd) or inject(fd) for fd in range(3)], os.getsid(0) == os.getpid()
"""
    assert arena.value(code) == (None, [False, False, False], True)


# A17: environment


def test_the_environment_is_an_allow_list(arena):
    code = """
import os
secret = ("TOKEN", "KEY", "SECRET", "RAY_", "AWS_", "PYTHONPATH", "PYTEST", "DOCKER", "AGENTRL")
own = [name for name in os.environ if any(word in name.upper() for word in secret)]
raw = [w for w in secret if w.encode() in open("/proc/self/environ", "rb").read()]
line = open("/proc/1/cmdline", "rb").read()
sorted(os.environ), own + raw, any(word.encode() in line for word in secret)
"""
    names, leaked, shown = arena.value(code)
    allowed = "HOME HOSTNAME LANG LC_CTYPE PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED TMPDIR"
    assert set(names) <= set(allowed.split())
    assert (leaked, shown) == ([], False)


# A18: the network of the host


def test_services_of_the_host_are_out_of_reach(arena):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import os, socket, subprocess
def reached(address, kind=socket.AF_INET):
    try: socket.socket(kind).connect(address); return True
    except OSError: return False
[reached(("127.0.0.1", {port})), reached(("169.254.169.254", 80)), reached(("8.8.8.8", 53)),
 reached("/run/docker.sock", socket.AF_UNIX), reached("\\0anything", socket.AF_UNIX)]
"""
        assert arena.value(code) == [False] * 5
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_event_loop_still_works_without_sockets(arena):
    code = "import asyncio\nasync def f(): await asyncio.sleep(0); return 7\nasyncio.run(f())"
    assert arena.value(code) == 7


# The protocol itself

FORGERIES = [
    "send(b'\\xff' * 100_000)",
    "send(struct.pack('!II', 10, 0) + b'not json!!')",
    "send(struct.pack('!II', 0, 1 << 31))",
    'send(report(b\'{"kind": "ok", "result": 5, "exit_code": "x"}\'))',
    "send(report(b'[' * 100_000))",
    'send(report(b\'{"kind": "ok"}\'))',
    'send(report(b\'{"kind": "ok"}\')); send(report(b\'{"kind": "ok"}\', 2))',
    'send(report(b\'{"kind": "ok"}\'))\nwhile True: pass',
    'send(report(b\'{"kind": "ok"}\', 7))\nwhile True: pass',
    "os.closerange(0, 300)",
    "os.dup2(1, 255)",
]
_FORGE = """
import os, struct
def report(text, n=1): return struct.pack('!II', len(text), 4) + text + struct.pack('!I', n)
def send(data): os.write(255, data)
"""


@pytest.mark.parametrize("number", range(len(FORGERIES)))
def test_a_forged_report_is_the_programs_own_loss(arena, number):
    async def scenario():
        box = await arena.open()
        result = await box.run_code(_FORGE + FORGERIES[number], timeout_s=0.5)
        following = [await box.run_code(f"{n} + 1", timeout_s=0.5) for n in range(3)]
        await box.close()
        return result.status, [after.result for after in following]

    status, following = arena.arm.run(scenario())
    assert status is not SandboxStatus.INFRA_ERROR
    # After at most one call the box has a new interpreter, and answers are in step.
    assert following[1:] == ["2", "3"]


def test_an_immense_report_costs_the_host_nothing(arena):
    """A report is JSON that the host parses: one of 20 MB would take it a second and a gigabyte."""
    code = """
import os, struct
h = b'{"kind": "ok", "result": [' + b'[],' * 7_000_000 + b'0]}'
frame = struct.pack('!II', len(h), 0) + h
while frame: frame = frame[os.write(255, frame[:65536]):]
"""
    assert arena.attack(code).status is OUTPUT_LIMIT


def test_a_forged_result_is_no_longer_than_an_honest_one(arena):
    code = """
import json
send(report(json.dumps({"kind": "ok", "result": "x" * 400_000}).encode()))
while True: pass
"""

    async def scenario():
        box = await arena.open()
        result = await box.run_code(_FORGE + code)
        await box.close()
        return result.result or ""

    assert LIMITS.output_bytes < len(arena.arm.run(scenario())) < LIMITS.output_bytes + 20_000


# All at once


def test_hostile_boxes_side_by_side_leave_an_honest_one_alone(arena):
    hostile = [BOMBS["python"], HOGS["appending"], FLOODS["print"], "while True: pass"]

    async def scenario():
        async def attack(code: str) -> SandboxStatus:
            box = await arena.open()
            status = (await box.run_code(code, timeout_s=1.0)).status
            await box.close()
            return status

        async def work() -> list[str | None]:
            box = await arena.open()
            answers = [(await box.run_code(f"{n} + 1")).result for n in range(20)]
            await box.close()
            return answers

        return await asyncio.gather(work(), *(attack(code) for code in hostile))

    honest, *statuses = arena.arm.run(scenario())
    assert honest == [str(n + 1) for n in range(20)]
    assert OK not in statuses and SandboxStatus.INFRA_ERROR not in statuses


EXECUTIONS = {"local": (200, 10_000), "docker": (20, 200), "http": (100, 1000)}


def test_executions_leave_nothing_behind(arena):
    """Fresh boxes with every fourth one hostile; AGENTRL_SOAK=1 runs the full number."""
    count = EXECUTIONS[arena.arm.name][SOAK]
    hostile = [
        "import os\nfor _ in range(6):\n    if os.fork() == 0: os.setsid(); os.pause()",
        "open('/tmp/x', 'w').write('y' * 10_000); import os; os._exit(3)",
        "import os\nwhile True: os.write(1, b'y' * 65536)",
        "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
    ]
    remaining = iter(range(count))
    wrong: list[object] = []

    async def worker() -> None:
        for number in remaining:
            box = await arena.open()
            try:
                if number % 4 == 0:
                    await box.run_code(hostile[number // 4 % len(hostile)], timeout_s=2)
                else:
                    result = await box.run_code(f"{number} * 2")
                    if result.result != str(number * 2):
                        wrong.append(result)
            except SandboxError as error:
                wrong.append(error)
            finally:
                await box.close()

    async def scenario() -> None:
        await asyncio.gather(*(worker() for _ in range(8)))

    arena.arm.deadline_s, usual_s = 3600.0 if SOAK else 120.0, arena.arm.deadline_s
    try:
        arena.arm.run(scenario())
    finally:
        arena.arm.deadline_s = usual_s
    assert wrong == []
