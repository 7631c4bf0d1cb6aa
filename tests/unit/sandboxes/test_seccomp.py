"""The filter program, run by a small interpreter of classic BPF."""

from __future__ import annotations

import struct

import pytest
from agentrl_sandboxes.supervised.inside.seccomp import (
    _DENIED,
    UnsupportedArchitecture,
    build_filter,
)

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "x86_64": {"read": 0, "clone": 56, "clone3": 435, "ioctl": 16, "prlimit64": 302,
               "setpriority": 141, "socket": 41, "socketpair": 53, "ptrace": 101, "execve": 59,
               "openat2": 437, "keyctl": 250, "setrlimit": 160, "sched_setaffinity": 203,
               "setsockopt": 54, "bind": 49, "connect": 42},
    "aarch64": {"read": 63, "clone": 220, "clone3": 435, "ioctl": 29, "prlimit64": 261,
                "setpriority": 140, "socket": 198, "socketpair": 199, "ptrace": 117,
                "execve": 221, "openat2": 437, "keyctl": 219, "setrlimit": 164,
                "sched_setaffinity": 122, "setsockopt": 208, "bind": 200, "connect": 203},
}  # fmt: skip


def verdict(program: bytes, arch: int, number: int, *args: int) -> int:
    """Run a filter on one system call and return its action."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *args, *([0] * (6 - len(args))))
    position, accumulator = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, position * 8)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return operand
        else:
            test = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: accumulator & operand != 0,
            }[code]
            position += if_true if test else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_programs_need_is_allowed_and_what_namespaces_miss_is_not(machine):
    program, arch, calls = build_filter(machine), ARCH[machine], CALLS[machine]

    def ask(name: str, *args: int) -> int:
        return verdict(program, arch, calls[name], *args)

    for name in ("read", "execve", "openat2", "socketpair"):
        assert ask(name) == ALLOW, name
    for name in ("socket", "ptrace", "keyctl"):
        assert ask(name) == EPERM, name
    assert ask("clone3") == ENOSYS
    assert ask("clone", 17) == ALLOW
    assert ask("clone", 0x3D0F00) == ALLOW, "a thread"
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 1 << 28, 1 << 29, 1 << 30):
        assert ask("clone", flag | 17) == EPERM, hex(flag)
    assert ask("ioctl", 0, 0x5401) == ALLOW
    assert ask("ioctl", 0, 0x5412) == EPERM
    assert (ask("prlimit64", 0), ask("prlimit64", 1)) == (ALLOW, EPERM)
    assert (ask("setpriority", 0, 0), ask("setpriority", 0, 1)) == (ALLOW, EPERM)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_socket_gets_a_name_and_the_supervisor_keeps_its_priority(machine):
    program, arch, calls = build_filter(machine), ARCH[machine], CALLS[machine]

    def ask(name: str, *args: int) -> int:
        return verdict(program, arch, calls[name], *args)

    assert (ask("bind"), ask("connect")) == (EPERM, EPERM)
    assert [ask("setsockopt", 5, 1, option) for option in (2, 16, 76)] == [ALLOW, EPERM, EPERM]
    # Of all processes of the user (2), which are the supervisor's too.
    assert [ask("setpriority", which, 0) for which in (0, 1, 2)] == [ALLOW, ALLOW, EPERM]
    assert (ask("sched_setaffinity", 0), ask("sched_setaffinity", 1)) == (ALLOW, EPERM)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_limit_of_cores_can_be_read_and_its_change_does_nothing(machine):
    program, arch, calls = build_filter(machine), ARCH[machine], CALLS[machine]
    nothing = 0x00050000  # "success", without the call

    def ask(name: str, *args: int) -> int:
        return verdict(program, arch, calls[name], *args)

    assert (ask("setrlimit", 4), ask("setrlimit", 7)) == (nothing, ALLOW)
    assert ask("prlimit64", 0, 4, 0, 0x1234) == ALLOW
    for pointer in (0x1234, 0x7FFF_0000_0000):  # one half of it may be zero
        assert ask("prlimit64", 0, 4, pointer, 0) == nothing
    assert ask("prlimit64", 0, 7, 0x1234, 0) == ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_number_has_its_own_verdict(machine):
    program, column = build_filter(machine), 0 if machine == "x86_64" else 1
    denied = {numbers[column] for numbers in _DENIED.values()}
    for number in range(600):
        # No process but the caller, no flag, no option: what is tested by argument is allowed.
        expected = EPERM if number in denied else ENOSYS if number == 435 else ALLOW
        assert verdict(program, ARCH[machine], number) == expected, number


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_other_entries_to_the_kernel_are_closed(machine):
    program = build_filter(machine)
    for arch in (0x40000003, 0x40000028, *(set(ARCH.values()) - {ARCH[machine]})):
        assert verdict(program, arch, CALLS[machine]["read"]) == ENOSYS
    if machine == "x86_64":
        assert verdict(program, ARCH[machine], 0x40000000) == ENOSYS


def test_a_machine_without_a_table_is_refused():
    with pytest.raises(UnsupportedArchitecture, match="riscv64"):
        build_filter("riscv64")
