"""Hostile programs: every limit holds, has its status, and the host looks as before.

`run_scenario` compares descriptors, mounts, control groups and processes of the host before and
after each test; each test also runs an ordinary cell afterwards, in the same box where one is
promised to survive, else in a fresh one.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from pathlib import Path

import pytest
from agentrl_sandboxes.local import LocalBackend
from sandbox_host import alive, descendants, run_scenario

from agentrl.errors import ToolError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus
from agentrl.sandbox.grading import call_function

LIMITS = SandboxLimits(wall_s=4.0, memory_mb=128, max_processes=16, disk_mb=8)


def run_hostile(code: str, limits: SandboxLimits = LIMITS, **kwargs: float) -> ExecResult:
    """Run one hostile cell; the box must answer an ordinary one afterwards."""

    async def scenario(backend: LocalBackend) -> ExecResult:
        box = await backend.create(limits)
        hostile = await box.run_code(code, **kwargs)
        after = await box.run_code("1 + 1")
        assert (after.status, after.result) == (SandboxStatus.OK, "2"), after
        return hostile

    return run_scenario(scenario)


# Processes


@pytest.mark.parametrize(
    "bomb",
    [
        "import subprocess; subprocess.run(['bash', '-c', ':(){ :|:& };:; sleep 9'])",
        "import os\nwhile True: os.fork()",
        "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(99)",
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
    ],
    ids=["shell", "python", "sleepers", "threads"],
)
def test_a_fork_bomb_hits_the_limit_and_dies_whole(bomb):
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        quiet = len(descendants())
        result = await box.run_code(bomb)
        again = await box.run_code("import threading; threading.active_count()")
        neighbour = await backend.create(LIMITS)
        assert (await neighbour.run_code("2 * 2")).result == "4"
        await box.close()
        await neighbour.close()
        return result, again, len(descendants()) - quiet

    result, again, grown = run_scenario(scenario)
    assert result.status is SandboxStatus.PIDS_LIMIT, result
    assert again.status is SandboxStatus.OK
    assert grown <= 3 * 4, "only boxes held in reserve"


def test_a_bomb_left_behind_by_a_call_is_found_and_dies_whole():
    bomb = """
import os
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        while True:
            try: os.fork()
            except OSError: pass
"""

    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        results = [await box.run_code(bomb)]
        while results[-1].status is SandboxStatus.OK and not results[-1].state_lost:
            await asyncio.sleep(0.05)
            results.append(await box.run_code("1"))
        return results[-1], await box.run_code("[p for p in __import__('os').listdir('/proc')]")

    found, after = run_scenario(scenario)
    assert found.status is SandboxStatus.PIDS_LIMIT or found.state_lost
    assert sorted(p for p in eval(after.result or "[]") if p.isdigit())[0] == "1"
    assert sum(p.isdigit() for p in eval(after.result or "[]")) == 2


def test_what_ignores_every_signal_is_killed_with_all_it_started():
    code = """
import os, signal, subprocess, time
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
"""
    result = run_hostile(code, timeout_s=0.5)
    assert result.status is SandboxStatus.TIMEOUT and result.state_lost


def test_an_interrupt_that_is_swallowed_is_still_a_time_out():
    result = run_hostile("try:\n    while True: pass\nexcept BaseException: pass", timeout_s=0.3)
    assert result.status is SandboxStatus.TIMEOUT


def test_cpu_time_is_bounded_also_in_children():
    limits = SandboxLimits(wall_s=20, cpu_s=1)
    result = run_hostile("import os\nos.fork()\nwhile True: pass", limits)
    assert result.status in (SandboxStatus.TIMEOUT, SandboxStatus.STATE_LOST)


# Memory, files, disk


@pytest.mark.parametrize(
    "hog",
    [
        "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
        "import mmap\nkept = []\nwhile True: kept.append(mmap.mmap(-1, 1 << 16))",
        "kept = b'x' * (10 << 30)",
        "import os, time\nfor _ in range(8):\n"
        "    if os.fork() == 0: kept = bytearray(60 << 20); time.sleep(60)\ntime.sleep(60)",
    ],
    ids=["appending", "small-maps", "at-once", "spread-over-processes"],
)
def test_memory_is_bounded_whatever_asks_for_it(hog):
    result = run_hostile(hog)
    assert result.status is SandboxStatus.OOM or (
        "mmap" in hog and "Cannot allocate memory" in (result.error or "")
    ), result


def test_memory_outside_the_address_space_is_refused():
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
shm = libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno()
try: memfd = os.memfd_create("x")
except OSError as error: memfd = error.errno
shm, memfd
"""
    assert run_hostile(code).result == "((-1, 1), 1)"


def test_the_disk_is_full_at_its_limit_and_inodes_too():
    code = """
import errno
def fill(folder):
    try:
        with open(folder + "/big", "wb") as f:
            for _ in range(64): f.write(bytes(1 << 20))
    except OSError as error: return error.errno
def litter(folder):
    try:
        for n in range(100_000): open(f"{folder}/{n}", "w").close()
    except OSError as error: return error.errno
[fill("/box") in (errno.ENOSPC, errno.EFBIG), fill("/tmp") in (errno.ENOSPC, errno.EFBIG),
 litter("/tmp") == errno.ENOSPC]
"""
    assert run_hostile(code).result == "[True, True, True]"


def test_open_files_end_with_emfile_inside_and_the_host_keeps_its_own():
    code = """
import os, errno
kept = []
try:
    while True:
        r, w = os.pipe(); kept += [r, w]
        os.set_blocking(w, False)
        try:
            while True: os.write(w, bytes(65536))
        except BlockingIOError: pass
except OSError as error: number = error.errno
for fd in kept: os.close(fd)
number == errno.EMFILE
"""
    assert run_hostile(code).result == "True"


# Output


@pytest.mark.parametrize(
    "flood",
    [
        "while True: print('y' * 1000)",
        "import os\nwhile True: os.write(1, b'y' * 65536)",
        "import os\nwhile True: os.write(2, b'e' * 65536)",
        "import subprocess; subprocess.run(['yes'])",
        "import os\nwhile True: os.write(1, b'\\x1b[31m\\xff\\xfe\\x80' * 9999)",
    ],
    ids=["print", "descriptor", "stderr", "child", "binary"],
)
def test_a_flood_is_cut_and_stopped_while_our_memory_stays_flat(flood):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run_hostile(flood, timeout_s=20)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert result.status is SandboxStatus.OUTPUT_LIMIT
    assert len(result.stdout) + len(result.stderr) < 2 * LIMITS.output_bytes + 1000
    assert result.truncated_bytes > 1_000_000
    assert f"[{result.truncated_bytes} bytes cut]" in result.stdout + result.stderr
    assert grown_kb < 64_000


def test_output_a_little_above_the_limit_is_cut_and_says_how_much():
    result = run_hostile(f"print('x' * {LIMITS.output_bytes + 99}, end='')")
    assert (result.status, result.truncated_bytes) == (SandboxStatus.OK, 99)
    assert result.stdout.endswith("[99 bytes cut]")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("'\\ud800'", "'\\ud800'"),
        ("import os; os.write(1, bytes(range(256)))", "256"),
        ("print('\\ud800\\0\\x1b[2J')", None),
        ("'x' * (1 << 20)", None),
        ("class A:\n    def __repr__(self): return 5\nA()", None),
        ("class A:\n    def __repr__(self): raise SystemExit\nA()", None),
        ("class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E", None),
        ("import sys; sys.stdout.close(); sys.stderr = None", None),
        ("print('\\x1b[0m' * 1_000_000)", None),
        ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", None),
    ],
)
def test_odd_values_and_streams_never_break_the_protocol(code, expected):
    result = run_hostile(code, timeout_s=1.5)
    assert result.status is not SandboxStatus.INFRA_ERROR
    if expected is not None:
        assert result.result == expected


# Reading and reaching what is not its own


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/root", "/home", str(Path(__file__).resolve()), "/var/log", "/sys/kernel"],
)
def test_the_hosts_files_are_not_there(path):
    assert Path(path).exists() or path == "/root"
    assert run_hostile(f"import os; os.path.exists({path!r})").result == "False"


def test_the_process_tree_and_the_settings_of_the_host_are_out_of_reach():
    code = """
import os
def attempt(do):
    try: return repr(do())[:80]
    except OSError as error: return type(error).__name__
denied = ("PermissionError", "FileNotFoundError", "OSError")
reads = ["/proc/1/environ", "/proc/1/mem", "/proc/1/root/etc", "/proc/1/fd/0", "/proc/1/maps",
         "/proc/kcore", "/proc/sys/kernel/core_pattern", "/proc/cmdline", "/proc/meminfo",
         "/proc/1/cwd/x", "/sys/fs/cgroup/release_agent", "/dev/mem", "/dev/tty", "/dev/kmsg"]
writes = ["/proc/sys/kernel/core_pattern", "/proc/self/exe", "/usr/bin/python3", "/etc/passwd",
          "/agentrl/inside/zygote.py", "/proc/1/oom_score_adj", "/proc/sysrq-trigger",
          "/new", "/dev/new"]
leaks = [p for p in reads if attempt(lambda: open(p, "rb").read(64)) not in denied]
leaks += [p for p in writes
          if attempt(lambda: open(p, "wb" if p in ("/new", "/dev/new") else "r+b")) not in denied]
leaks += [p for p in ("/proc/1/fd", "/proc/1/task/1/fd")
          if attempt(lambda: os.listdir(p)) not in denied]
leaks, sorted(p for p in os.listdir("/proc") if p.isdigit())
"""
    assert run_hostile(code).result == "([], ['1', '2'])"


def test_signals_limits_and_priorities_do_not_reach_the_supervisor():
    code = """
import os, resource, signal
hits = []
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
    os.kill(1, number)
for do in (lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)),
           lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
           lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))):
    try: do(); hits.append(do)
    except PermissionError: pass
for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
    soft, hard = resource.getrlimit(limit)
    try: resource.setrlimit(limit, (hard + 1, hard + 1)); hits.append(limit)
    except ValueError: pass
hits
"""
    assert run_hostile(code).result == "[]"


def test_dangerous_system_calls_are_refused():
    numbers = {
        "x86_64": {
            "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "keyctl": 250,
            "add_key": 248, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
            "io_uring_setup": 425, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
            "fsopen": 430, "open_tree": 428, "move_mount": 429, "pidfd_getfd": 438, "chroot": 161,
            "pivot_root": 155, "clone3": 435, "socket": 41, "kexec_load": 246, "init_module": 175,
            "open_by_handle_at": 304, "x32 getpid": 0x40000000 + 39, "memfd_secret": 447,
        },
    }  # fmt: skip
    machine = os.uname().machine
    if machine not in numbers:
        pytest.skip(f"no table of expectations for {machine}")
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
allowed = []
for name, number in {numbers[machine]}.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0)
    if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        allowed.append((name, result, ctypes.get_errno()))
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000):
    pid = libc.syscall(56, flag | 17, 0, 0, 0, 0)
    if pid >= 0: allowed.append(("clone", hex(flag)))
if libc.ioctl(0, 0x5412, b"x") == 0: allowed.append("TIOCSTI")
allowed
"""
    assert run_hostile(code).result == "[]"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="an x86 instruction")
def test_the_32_bit_entry_to_the_kernel_is_closed():
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
call() == -38
"""
    result = run_hostile(code)
    assert result.result == "True" or result.exit_code == -11  # no such entry in this kernel


def test_siblings_share_nothing():
    traces = """
import os, glob
for folder in ("/box", "/tmp", "/dev/shm"):
    open(folder + "/trace", "w").write("here")
os.environ["TRACE"] = "here"
import builtins; builtins.TRACE = "here"
import multiprocessing.shared_memory as m
m.SharedMemory("memory", create=True, size=100)
"""
    search = """
import os, builtins, glob
[p for f in ("/box", "/tmp", "/dev/shm", "/var/tmp", "/run") for p in glob.glob(f + "/*")], \
    os.environ.get("TRACE"), hasattr(builtins, "TRACE"), \
    [p for p in os.listdir("/proc") if p.isdigit()]
"""

    async def scenario(backend: LocalBackend):
        first = await backend.create(LIMITS)
        left = await first.run_code(traces)
        second = await backend.create(LIMITS)
        during = await second.run_code(search)
        await first.close()
        third = await backend.create(LIMITS)
        return left, during, await third.run_code(search)

    left, during, after = run_scenario(scenario)
    assert left.status is SandboxStatus.OK, left
    assert during.result == after.result == "([], None, False, ['1', '2'])"


def test_there_is_no_controlling_terminal():
    code = "import os\nos.path.exists('/dev/tty'), os.isatty(0), os.getsid(0) == os.getpid()"
    assert run_hostile(code).result == "(False, False, True)"


def test_the_environment_is_an_allow_list(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "RAY_ADDRESS", "PYTHONPATH"):
        monkeypatch.setenv(name, "leaked-value")

    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        own = await box.run_code("import os; sorted(os.environ)")
        raw = await box.run_code("b'leaked-value' in open('/proc/self/environ', 'rb').read()")
        child = await box.exec(["env"])
        private = await box.run_private("import os; reply(repr(dict(os.environ)).encode())", b"")
        return own.result or "", raw.result, child.stdout, private.private

    own, raw, child, private = run_scenario(scenario)
    allowed = "HOME LANG LC_CTYPE PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED TMPDIR"
    assert set(eval(own)) <= set(allowed.split(" "))
    assert raw == "False"
    assert "leaked-value" not in child and b"leaked-value" not in private


def test_loopback_services_of_the_host_are_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
def connect():
    try: socket.create_connection(("127.0.0.1", {port}), 1)
    except OSError: return "refused"
connect()
"""
        assert run_hostile(code).result == "'refused'"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_event_loop_still_works_without_sockets():
    code = "import asyncio\nasync def f(): await asyncio.sleep(0); return 7\nasyncio.run(f())"
    assert run_hostile(code).result == "7"


# Paths


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "/box/../etc/passwd",
        "a/../../etc/passwd",
        "link/passwd",
        "/proc/1/environ",
        "/proc/self/root/etc/passwd",
        "fifo",
        ".",
        "x" * 5000,
        "a\0b",
        "/tmp/../etc/passwd",
    ],
)
def test_no_path_leaves_the_box(path):
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        await box.run_code("import os; os.symlink('/etc', 'link'); os.mkfifo('fifo')")
        with pytest.raises(ToolError):
            await box.read(path)
        with pytest.raises(ToolError):
            await box.write(path, b"overwritten")
        return await box.run_code("open('/etc/passwd').read()")

    assert "overwritten" not in (run_scenario(scenario).result or "")


def test_a_link_swapped_during_writes_never_leads_out():
    swap = """
import os, threading
os.mkdir("real"); os.symlink("real", "d")
def swapping():
    while True:
        for target in ("/etc", "real"):
            os.symlink(target, "new"); os.rename("new", "d")
threading.Thread(target=swapping, daemon=True).start()
"""

    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        await box.run_code(swap)
        refused = 0
        for _ in range(200):
            try:
                await box.write("d/passwd", b"swapped")
            except ToolError:
                refused += 1
        return refused, await box.run_code("open('/etc/passwd').read()[:4]")

    refused, passwd = run_scenario(scenario)
    assert refused, "the race was met at least once"
    assert passwd.result == "'user'"


# The protocol itself


@pytest.mark.parametrize(
    "forgery",
    [
        "os.write(255, b'\\xff' * 100_000)",
        "os.write(255, struct.pack('!II', 10, 0) + b'not json!!')",
        "os.write(255, struct.pack('!II', 0, 1 << 31))",
        "h = json.dumps({'kind': 'ok', 'result': 5, 'exit_code': 'x'}).encode(); "
        "os.write(255, struct.pack('!II', len(h), 0) + h)",
        "h = b'[' * 100_000; os.write(255, struct.pack('!II', len(h), 0) + h)",
        "os.closerange(0, 300)",
        "os.dup2(1, 255)",
    ],
)
def test_a_forged_report_is_the_programs_own_loss(forgery):
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        result = await box.run_code("import os, json, struct\n" + forgery, timeout_s=1)
        fresh = await backend.create(LIMITS)
        assert (await fresh.run_code("1")).result == "1"
        return result

    assert run_scenario(scenario).status is not SandboxStatus.INFRA_ERROR


# Grading: each hack beside an honest twin


HONEST = "def add(a, b):\n    return a + b"
CALLS = [(1, 2), (3, 4), (10, -4)]
EXPECTED = [3, 7, 6]

HACKS = {
    "exits at import": "import sys; sys.exit(0)",
    "exits hard at import": "import os; os._exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "prints and writes a result": "import json\nopen('result.json', 'w').write('{\"passed\": 3}')\n"
    "print('3 passed')\ndef add(a, b): return None",
    "equals everything": "class Yes:\n    def __eq__(self, other): return True\n"
    "def add(a, b): return Yes()",
    "equals everything as an int": "class Yes(int):\n    def __eq__(self, other): return True\n"
    "def add(a, b): return Yes()",
    "looks for the expected value": "import gc, sys\ndef add(a, b):\n    frame = sys._getframe()\n"
    "    while frame:\n        for v in list(frame.f_locals.values()):\n"
    "            if isinstance(v, dict) and 'expected' in v: return v['expected']\n"
    "        frame = frame.f_back\n"
    "    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
    "    return found[0]['expected'] if found else None",
    "hangs": "def add(a, b):\n    while True: pass",
    "hangs at import": "while True: pass",
    "crashes": "import ctypes\ndef add(a, b): ctypes.string_at(8)",
    "eats memory": "def add(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 20))",
    "bombs": "import os\ndef add(a, b):\n    while True: os.fork()",
    "patches the encoder": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\n"
    "def add(a, b): return None",
    "claims infrastructure": "import sys\ndef add(a, b):\n    f = sys._getframe()\n"
    "    while f and 'reply' not in f.f_globals: f = f.f_back\n"
    '    f.f_globals[\'reply\'](b\'{"call": -1, "error": "infra_error"}\\n\')\n'
    "    import os; os._exit(0)",
    "kills its parent": "import os\nfor p in (1, os.getppid()):\n    os.kill(p, 9)\n"
    "def add(a, b): return 0",
}


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_earns_nothing_beside_an_honest_twin(name):
    async def scenario(backend: LocalBackend):
        scores = []
        for source in (HACKS[name], HONEST):
            box = await backend.create(LIMITS)
            outcomes = await call_function(
                box, source=source, entry_point="add", args_list=CALLS, timeout_s=2
            )
            await box.close()
            scores.append([outcome.value for outcome in outcomes])
            assert all(o.status is not SandboxStatus.INFRA_ERROR for o in outcomes)
        return scores

    hacked, honest = run_scenario(scenario)
    assert not any(
        type(got) is int and got == want for got, want in zip(hacked, EXPECTED, strict=True)
    )
    assert honest == EXPECTED


def test_a_process_left_waiting_for_the_grader_never_meets_it():
    """The agent's box dies before grading, and the grader's box is another one."""
    ambush = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        for folder in ("/box", "/tmp"):
            open(folder + "/solution.py", "w").write("def add(a, b): return 0")
"""

    async def scenario(backend: LocalBackend):
        before = descendants()  # of whatever ran in this process before
        agent = await backend.create(LIMITS)
        await agent.run_code(ambush)
        await agent.write("answer.py", HONEST.encode())
        answer = (await agent.read("answer.py")).decode()
        processes = descendants() - before
        await agent.close()
        grader = await backend.create(LIMITS)
        outcomes = await call_function(grader, source=answer, entry_point="add", args_list=CALLS)
        seen = await grader.run_code("import os; os.listdir('/box') + os.listdir('/tmp')")
        return outcomes, seen, processes

    outcomes, seen, processes = run_scenario(scenario)
    assert [outcome.value for outcome in outcomes] == EXPECTED
    assert seen.result == "[]"
    assert not alive(processes)


def test_hostile_boxes_side_by_side_leave_an_honest_one_alone():
    hostile = [
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "while True: print('y' * 10000)",
        "while True: pass",
    ]

    async def scenario(backend: LocalBackend):
        async def attack(code: str) -> SandboxStatus:
            box = await backend.create(LIMITS)
            status = (await box.run_code(code, timeout_s=1.0)).status
            await box.close()
            return status

        async def work() -> list[str | None]:
            box = await backend.create(LIMITS)
            return [(await box.run_code(f"{n} + 1")).result for n in range(20)]

        return await asyncio.gather(work(), *(attack(code) for code in hostile * 2))

    honest, *statuses = run_scenario(scenario)
    assert honest == [str(n + 1) for n in range(20)]
    assert SandboxStatus.OK not in statuses and SandboxStatus.INFRA_ERROR not in statuses
