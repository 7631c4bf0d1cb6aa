"""Hostile programs that use up what there is: every limit holds and has its status.

One test per kind of attack, with several programs of the kind, against each sandbox that can be
attacked on this machine. After each program an ordinary one runs within a second: in the same box
where that survives, and in a fresh one. After each test, what can be listed of the host is the
same as before.
"""

from __future__ import annotations

import asyncio
import os
import resource

import pytest
from abuse_arena import ATTACKED, LIMITS, OK

from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxLimits, SandboxStatus

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("backend", ATTACKED, indirect=True),
]

ERROR, TIMEOUT, OOM = SandboxStatus.ERROR, SandboxStatus.TIMEOUT, SandboxStatus.OOM
PIDS_LIMIT, OUTPUT_LIMIT = SandboxStatus.PIDS_LIMIT, SandboxStatus.OUTPUT_LIMIT
STATE_LOST = SandboxStatus.STATE_LOST
SOAK = os.environ.get("AGENTRL_SOAK") == "1"

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


EXECUTIONS = (200, 10_000)


@pytest.mark.timeout(7200 if SOAK else 300)
def test_executions_leave_nothing_behind(arena):
    """Fresh boxes with every fourth one hostile; AGENTRL_SOAK=1 runs the full number."""
    count = EXECUTIONS[SOAK]
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

    arena.arm.deadline_s, usual_s = 7000.0 if SOAK else 280.0, arena.arm.deadline_s
    try:
        arena.arm.run(scenario())
    finally:
        arena.arm.deadline_s = usual_s
    assert wrong == []
