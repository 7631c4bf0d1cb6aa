"""The system-call filter: a deny list in classic BPF, one table per architecture.

Everything that a namespace does not confine is denied: keys, io_uring, bpf, tracing, mounting,
new namespaces, memory that no limit counts, what the kernel counts per user and not per box.
Boxes may share a network namespace, so sockets are denied but for `socketpair`, and no socket
may get a name. Denied calls return an error and do not kill, so that a library which merely
probes goes on.
"""

from __future__ import annotations

import struct

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

# Any CLONE_NEW* bit: mount, cgroup, uts, ipc, user, pid, net, time.
_CLONE_NAMESPACES = 0x7E020000 | 0x80
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# name: (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "socket": (41, 198),
    # An end of a socket pair could be bound to an abstract name, or connected to one of another
    # box in the same network namespace.
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # Instances are counted per user of the host: one box could use up those of all.
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy": (238, 237),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "landlock_create_ruleset": (444, 444),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
}
_CLONE3 = 435
_PRIO_USER, _RLIMIT_CORE = 2, 4
# Either makes the kernel give a socket a name of its own at the next send.
_SO_PASSCRED, _SO_PASSPIDFD = 16, 76


class UnsupportedArchitecture(Exception):
    """No table for this machine: refuse rather than run without a filter."""


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _deny(number: int = _EPERM) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _low_word(argument: int) -> int:
    return _OFFSET_ARGS + 8 * argument


def _deny_if(argument: int, test: int, operand: int, error: int = _EPERM) -> bytes:
    """Deny if an argument (its low 32 bits) passes a test; else go on."""
    return _op(_LOAD, _low_word(argument)) + _op(test, operand, 0, 1) + _deny(error)


def _deny_other_process(argument: int) -> bytes:
    """Deny if an argument names any process but the caller (0); else go on."""
    return _op(_LOAD, _low_word(argument)) + _op(_JUMP_EQUAL, 0, 1, 0) + _deny()


def _ignore_change_of(limit: int) -> bytes:
    """Let prlimit64 do nothing where it would set this limit (its third argument is no null)."""
    return (
        _op(_LOAD, _low_word(1))
        + _op(_JUMP_EQUAL, limit, 0, 5)
        + _op(_LOAD, _low_word(2))
        + _op(_JUMP_EQUAL, 0, 0, 2)
        + _op(_LOAD, _low_word(2) + 4)
        + _op(_JUMP_EQUAL, 0, 1, 0)
        + _deny(0)
    )


# Calls allowed but for some arguments: (x86_64, aarch64) numbers, and tests in a row.
_TESTED: tuple[tuple[tuple[int, int], tuple[bytes, ...]], ...] = (
    ((56, 220), (_deny_if(0, _JUMP_SET, _CLONE_NAMESPACES),)),  # clone
    # ioctl
    ((16, 29), (_deny_if(1, _JUMP_EQUAL, _TIOCSTI), _deny_if(1, _JUMP_EQUAL, _TIOCLINUX))),
    # Limits, priority and processors of the supervisor, which runs under the same user id.
    # A core limit of 1 keeps crashes from the host's crash handler, one of 0 would not. To lower
    # it "succeeds" without effect: programs do so with good intent.
    ((302, 261), (_deny_other_process(0), _ignore_change_of(_RLIMIT_CORE))),  # prlimit64
    ((160, 164), (_deny_if(0, _JUMP_EQUAL, _RLIMIT_CORE, 0),)),  # setrlimit
    ((141, 140), (_deny_other_process(1), _deny_if(0, _JUMP_EQUAL, _PRIO_USER))),  # setpriority
    ((203, 122), (_deny_other_process(0),)),  # sched_setaffinity
    # setsockopt
    (
        (54, 208),
        (_deny_if(2, _JUMP_EQUAL, _SO_PASSCRED), _deny_if(2, _JUMP_EQUAL, _SO_PASSPIDFD)),
    ),
)


def build_filter(machine: str) -> bytes:
    """Return the filter program for `platform.machine()`.

    Raises:
        UnsupportedArchitecture: no table for this machine.
    """
    if machine not in _AUDIT_ARCH:
        raise UnsupportedArchitecture(
            f"no system-call table for {machine!r}; supported: {', '.join(_AUDIT_ARCH)}"
        )
    column = 0 if machine == "x86_64" else 1
    rules = {n[column]: _deny() for n in _DENIED.values() if n[column] is not None}
    rules |= {numbers[column]: b"".join(tests) + _op(_RETURN, _ALLOW) for numbers, tests in _TESTED}
    # clone3 hides its flags behind a pointer; libc falls back to clone on ENOSYS.
    rules[_CLONE3] = _deny(_ENOSYS)
    program = _op(_LOAD, _OFFSET_ARCH)
    # Another ABI (32-bit int 0x80) has other numbers: nothing of it is allowed.
    program += _op(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0) + _deny(_ENOSYS)
    program += _op(_LOAD, _OFFSET_NUMBER)
    if machine == "x86_64":
        program += _op(_JUMP_GE, _X32_BIT, 0, 1) + _deny(_ENOSYS)
    return program + _search(_ranges(rules))


def _ranges(rules: dict[int | None, bytes]) -> list[tuple[int, bytes]]:
    """Rules by number as (first number, what to do from there on), neighbours merged."""
    allow = _op(_RETURN, _ALLOW)
    found = [(0, allow)]
    for number in sorted(n for n in rules if n is not None):
        for start, action in ((number, rules[number]), (number + 1, allow)):
            if found[-1][0] == start:
                found.pop()
            if not found or found[-1][1] != action:
                found.append((start, action))
    return found


def _search(ranges: list[tuple[int, bytes]]) -> bytes:
    """A binary search for the number's range: the kernel runs it over all numbers per box."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return _op(_JUMP_GE, ranges[middle][0], len(below) // 8, 0) + below + above
