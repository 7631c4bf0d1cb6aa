"""The system calls that Python does not wrap: clone, mount, prctl, capset, openat2."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

_MS_NOSUID, _MS_NODEV = 2, 4
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECCOMP = 4, 24, 22
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SECCOMP_MODE_FILTER = 2
_SA_NOCLDSTOP = 1
_CAPABILITY_VERSION_3 = 0x20080522
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_SYS_OPENAT2 = 437  # one number on every architecture
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_prctl, _sigaction = _libc.prctl, _libc.sigaction  # looked up once, not in every box
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_machine = platform.machine()
_CLONE_NUMBER, _CAPSET_NUMBER = _SYS_CLONE.get(_machine, -1), _SYS_CAPSET.get(_machine, -1)

# Made once, before any fork: each of these creates a type, which touches dozens of shared pages.
_CAPSET_HEADER = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
_NO_CAPABILITIES = ctypes.create_string_buffer(24)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class _SignalAction(ctypes.Structure):
    # As the C library has it, which is alike on both architectures.
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork_into(namespaces: int) -> int:
    """Fork with new namespaces in one system call; return 0 in the child, its pid in the parent.

    `os.fork` followed by `unshare` would need a second fork, since a process never enters the
    pid namespace it makes. The interpreter's fork hooks are left out: they exist for other
    threads, of which there are none here, and they touch (so copy) hundreds of shared pages.
    """
    pid = _libc.syscall(_CLONE_NUMBER, namespaces | signal.SIGCHLD, 0, 0, 0, 0)
    return _check(pid, "clone")


def map_own_user(uid: int, gid: int) -> None:
    """Map this process's ids to themselves in its new user namespace."""
    for name, value in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


def mount(kind: str, target: str, options: str) -> None:
    """Mount a fresh file system of this kind; never set-uid, never devices."""
    flags = _MS_NOSUID | _MS_NODEV
    result = _libc.mount(kind.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(result, f"mount {kind} on {target}")


def drop_privileges() -> None:
    """Give up every capability, now and for any program run later."""
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for capability in range(64):
        if _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the kernel's last capability
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _check(_libc.syscall(_CAPSET_NUMBER, _CAPSET_HEADER, _NO_CAPABILITIES), "capset")


def report_no_stops() -> None:
    """Send no SIGCHLD for a child that stops or goes on, only for one that ends."""
    action = _SignalAction()
    _check(_sigaction(signal.SIGCHLD, None, ctypes.byref(action)), "sigaction")
    action.flags |= _SA_NOCLDSTOP
    _check(_sigaction(signal.SIGCHLD, ctypes.byref(action), None), "sigaction")


def set_dumpable(dumpable: bool) -> None:
    """A process that is not dumpable keeps its /proc entries from others of the same user."""
    _check(_prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "set_dumpable")


@functools.lru_cache(maxsize=1)
def load_seccomp(program: bytes) -> _Program:
    """Lay a filter out for the kernel; done before a fork, it need not be done after it."""
    buffer = ctypes.create_string_buffer(program, len(program))
    return _Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))


def install_seccomp(program: bytes) -> None:
    """Install a classic-BPF filter on this process and its future children."""
    loaded = ctypes.byref(load_seccomp(program))
    result = _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, loaded, 0, 0)
    _check(result, "seccomp")


def open_beneath(directory_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path that must stay beneath a directory, whatever links lie on the way.

    The kernel resolves it in one step, so a link swapped meanwhile changes nothing.
    """
    how = struct.pack("=QQQ", flags, mode, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    buffer = ctypes.create_string_buffer(how, len(how))
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("a path cannot hold a NUL byte")
    fd = _libc.syscall(_SYS_OPENAT2, directory_fd, name, buffer, len(how))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return fd
