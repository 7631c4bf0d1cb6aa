"""Hostile programs that reach for what is not theirs: the host, its files, other boxes.

As in `test_sandbox_abuse.py`: an ordinary program runs right afterwards, and the host is as before.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from abuse_arena import ATTACKED, OK

from agentrl.errors import ToolError

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("backend", ATTACKED, indirect=True),
]

# A7: archives. Nothing on the host's side unpacks one; a program in a box does as it likes there.


def test_archives_unpacked_in_a_box_stay_in_it(arena):
    code = """
import errno, io, os, tarfile, zipfile
def outcome(do):
    try: do(); return "done"
    except OSError as error: return errno.errorcode.get(error.errno, "other")
with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
    for n in range(64): bomb.writestr(f"{n}", bytes(1 << 20))
full = outcome(lambda: zipfile.ZipFile("bomb.zip").extractall("bombed"))
import shutil; shutil.rmtree("bombed")
def member(name, kind=tarfile.REGTYPE, link=""):
    entry = tarfile.TarInfo(name); entry.type, entry.linkname = kind, link
    entry.size = 4 if kind == tarfile.REGTYPE else 0
    entry.devmajor, entry.devminor = 1, 1
    return entry
def unpack(*members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for entry in members: tar.addfile(entry, io.BytesIO(b"evil"))
    data.seek(0)
    with tarfile.open(fileobj=data) as tar:
        for entry in tar: tar._extract_member(entry, os.path.join("/box/out", entry.name))
os.mkdir("out")
tried = [outcome(lambda: unpack(member("../../etc/passwd"))),
         outcome(lambda: unpack(member("/etc/passwd"))),
         outcome(lambda: unpack(member("d", tarfile.SYMTYPE, "/etc"), member("d/passwd"))),
         outcome(lambda: unpack(member("mem", tarfile.CHRTYPE)))]
full in ("ENOSPC", "EFBIG"), "done" in tried, "evil" in open("/etc/passwd").read()
"""

    async def scenario():
        box = await arena.open()
        unpacked = await box.run_code(code)
        # A link that an archive has left does not lead our own reading and writing out.
        for path in ("out/d/passwd", "out/d/shadow"):
            with pytest.raises(ToolError):
                await box.read(path)
            with pytest.raises(ToolError):
                await box.write(path, b"evil")
        await arena.check_next(box)
        await box.close()
        return unpacked

    unpacked = arena.arm.run(scenario())
    assert unpacked.result == "(True, False, False)", unpacked


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
