"""One contract for every sandbox backend: the same results, and the same words for each failure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from sandbox_arms import ARMS, ArmUnavailable, StartedBackend, cannot_run, kill_first_process

from agentrl.errors import ConfigError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxBackend, SandboxLimits, SandboxStatus

pytestmark = pytest.mark.timeout(240)

T = TypeVar("T")
LIMITS = SandboxLimits(wall_s=4.0, memory_mb=128, max_processes=16, disk_mb=16)
OK, ERROR, TIMEOUT = SandboxStatus.OK, SandboxStatus.ERROR, SandboxStatus.TIMEOUT
OOM, PIDS_LIMIT = SandboxStatus.OOM, SandboxStatus.PIDS_LIMIT
OUTPUT_LIMIT, STATE_LOST = SandboxStatus.OUTPUT_LIMIT, SandboxStatus.STATE_LOST


def in_box(
    backend: StartedBackend,
    use: Callable[[Sandbox], Awaitable[T]],
    limits: SandboxLimits = LIMITS,
) -> T:
    """Use a fresh box, and close it."""

    async def scenario() -> T:
        box = await backend.backend.create(limits)
        try:
            return await use(box)
        finally:
            await box.close()

    return backend.run(scenario())


# How a cell can end

CELLS = {
    "an expression": ("a = 20\na + 1", OK, "21", None, False),
    "nothing to show": ("a = None\na", OK, None, None, False),
    "an exception": ("1 / 0", ERROR, None, "ZeroDivisionError: division by zero", False),
    "no Python": ("for", ERROR, None, "SyntaxError", False),
    "exit 0": ("import sys; sys.exit(0)", OK, None, None, False),
    "exit 3": ("import sys; sys.exit(3)", ERROR, None, "SystemExit: 3", False),
    "ends its interpreter": ("import os; os._exit(7)", STATE_LOST, None, "code 7", True),
    "a signal to itself": ("import os; os.kill(os.getpid(), 9)", STATE_LOST, None, "SIGKILL", True),
    "memory at once": ("b'x' * (10 << 30)", OOM, None, "MemoryError", False),
    "memory of many": (
        "import os, time\nfor _ in range(8):\n"
        "    if os.fork() == 0: kept = b'x' * (60 << 20); time.sleep(60)\ntime.sleep(60)",
        OOM,
        None,
        "Memory limit of 128 MB exceeded.",
        True,
    ),
    "processes": (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(60)\n"
        "time.sleep(60)",
        PIDS_LIMIT,
        None,
        "More than 16 processes and threads.",
        True,
    ),
    "a flood": ("while True: print('y' * 1000)", OUTPUT_LIMIT, None, "Stopped: output", True),
}


@pytest.mark.parametrize(
    ("code", "status", "value", "reason", "loses_state"), CELLS.values(), ids=list(CELLS)
)
def test_a_cell_ends_with_its_status(backend, code, status, value, reason, loses_state):
    async def use(box: Sandbox) -> tuple[ExecResult, ExecResult]:
        await box.run_code("kept = 'still here'")
        return await box.run_code(code), await box.run_code("kept")

    ended, after = in_box(backend, use)
    assert (ended.status, ended.result, ended.state_lost) == (status, value, loses_state), ended
    assert reason is None or reason in (ended.error or ""), ended
    if loses_state:
        assert (after.status, "NameError" in (after.error or "")) == (ERROR, True), after
    else:
        assert (after.status, after.result) == (OK, "'still here'"), after


@pytest.mark.parametrize("loses_state", [False, True], ids=["reacts", "does not react"])
def test_a_time_out_keeps_names_if_the_cell_reacts(backend, loses_state):
    deaf = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\n" if loses_state else ""
    code = f"{deaf}print('before')\nwhile True: pass"

    async def use(box: Sandbox) -> tuple[ExecResult, ExecResult]:
        await box.run_code("kept = 1")
        return await box.run_code(code, timeout_s=0.5), await box.run_code("kept")

    late, after = in_box(backend, use)
    assert (late.status, late.stdout, late.state_lost) == (TIMEOUT, "before\n", loses_state), late
    assert "0.5 s" in (late.error or "") or "time limit" in (late.error or ""), late
    assert (after.status is OK) is not loses_state


def test_output_above_the_limit_is_cut_and_counted(backend):
    more = LIMITS.output_bytes + 99

    async def use(box: Sandbox) -> ExecResult:
        return await box.run_code(f"import sys\nprint('x' * {more}, end='')\nsys.stderr.write('e')")

    cut = in_box(backend, use)
    assert (cut.status, cut.truncated_bytes, cut.stderr) == (OK, 99, "e")
    assert cut.stdout.startswith("x" * 1000) and cut.stdout.endswith("[99 bytes cut]")
    assert len(cut.stdout) < LIMITS.output_bytes + 100


@pytest.mark.parametrize(
    "code",
    [
        "'\\ud800'",
        "import os; os.write(1, bytes(range(256))) and None",
        "print('\\ud800\\0\\x1b[2J\\u202e')",
        "raise ValueError('\\ud800\\0')",
        "x = '\u00e9\u4e2d\U0001f600'; x",
        "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E",
        "import sys; sys.stdout.close(); sys.stderr = None",
    ],
)
def test_whatever_is_printed_or_raised_the_next_call_is_in_step(backend, code):
    async def use(box: Sandbox) -> tuple[ExecResult, ExecResult]:
        return await box.run_code(code), await box.run_code("6 * 7")

    odd, after = in_box(backend, use)
    assert odd.status in (OK, ERROR), odd
    assert (after.status, after.result) == (OK, "42")


def test_text_of_any_alphabet_comes_back_as_it_went_in(backend):
    text = "h\u00e9llo \u4e2d\u6587 \U0001f600 \u202e"

    async def use(box: Sandbox) -> tuple[ExecResult, ExecResult]:
        return await box.run_code(f"print({text!r})"), await box.exec(["echo", text])

    printed, echoed = in_box(backend, use)
    assert printed.stdout == echoed.stdout == text + "\n"


# Commands and private programs


def test_commands_get_stdin_and_return_their_exit_code(backend):
    data = bytes(range(256)) * 1000

    async def use(box: Sandbox) -> list[ExecResult]:
        with pytest.raises(ToolError):
            await box.exec(["echo", "a\0b"])
        with pytest.raises(ToolError):
            await box.exec([])
        await box.run_code("kept = 1")
        return [
            await box.exec(["wc", "-c"], stdin=data),
            await box.exec(["sh", "-c", "echo out; echo err >&2; pwd; exit 5"]),
            await box.exec(["no-such-program"]),
            await box.exec(["true"], stdin=data),
            await box.run_code("kept"),
            await box.exec(["sleep", "60"], timeout_s=0.3),
            await box.exec(["sh", "-c", "yes"]),
        ]

    counted, failed, missing, unread, kept, late, flood = in_box(backend, use)
    assert (counted.status, counted.stdout.strip()) == (OK, "256000")
    assert (failed.status, failed.exit_code) == (ERROR, 5)
    assert (failed.stdout, failed.stderr) == ("out\n/box\n", "err\n")
    assert (missing.status, missing.exit_code) == (ERROR, 127)
    assert "no-such-program" in missing.stderr
    assert (unread.status, unread.exit_code, kept.result) == (OK, 0, "1")
    assert late.status is TIMEOUT and flood.status is OUTPUT_LIMIT


def test_a_private_program_replies_where_no_output_can_reach(backend):
    source = "import os\nos.write(1, b'forged')\nprint('noise')\nreply(PAYLOAD[::-1])\nreply(b'!')"
    payload = bytes(range(256)) * 4000

    async def use(box: Sandbox) -> list[ExecResult]:
        await box.run_code("kept = 5")
        return [
            await box.run_private(source, payload),
            await box.run_private("reply(b'early')\n1 / 0", b""),
            await box.run_private("import os; os._exit(3)", b""),
            await box.run_private("while True: pass", b"", timeout_s=0.3),
            await box.run_code("'PAYLOAD' in globals(), 'reply' in globals()"),
        ]

    replied, raised, ended, late, after = in_box(backend, use)
    assert (replied.status, replied.private) == (OK, payload[::-1] + b"!")
    assert replied.stdout == "forgednoise\n"
    assert (raised.status, raised.private) == (ERROR, b"early")
    assert "ZeroDivisionError" in (raised.error or "")
    assert (ended.status, ended.private, late.status) == (ERROR, b"", TIMEOUT)
    assert after.result == "(False, False)"


# Files


def test_files_go_in_and_come_out(backend):
    small, large = bytes(range(256)), os.urandom(5_000_000)

    async def use(box: Sandbox) -> ExecResult:
        await box.write("deep/er/small.bin", small)
        await box.write("large.bin", large)
        await box.write("empty", b"")
        await box.write("/tmp/scratch.txt", b"x")
        await box.write("helper.py", b"def triple(x): return 3 * x")
        await box.write("h\u00e9 \u4e2d.txt", b"named")
        assert await box.read("deep/er/small.bin") == small
        assert await box.read("/box/large.bin") == large
        assert await box.read("empty") == b""
        assert await box.read("h\u00e9 \u4e2d.txt") == b"named"
        await box.write("large.bin", small)
        assert await box.read("large.bin") == small
        return await box.run_code(
            "import helper; helper.triple(2), open('/tmp/scratch.txt').read(),"
            "len(open('deep/er/small.bin', 'rb').read())"
        )

    assert in_box(backend, use).result == "(6, 'x', 256)"


@pytest.mark.parametrize(
    "path",
    ["absent", "deep", "", ".", "a\0b", "../escape", "/etc/passwd", "deep/../../etc/passwd"]
    + ["link", "way/out", "/box/../etc/passwd", "/proc/self/environ", "fifo", "x" * 5000, "deep/"],
)
def test_a_path_that_is_no_file_of_the_box_is_the_models_mistake(backend, path):
    prepare = (
        "import os\nos.makedirs('deep', exist_ok=True)\n"
        "os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'way'); os.mkfifo('fifo')"
    )

    async def use(box: Sandbox) -> ExecResult:
        await box.run_code(prepare)
        with pytest.raises(ToolError):
            await box.read(path)
        if path not in ("absent", "fifo"):
            with pytest.raises(ToolError):
                await box.write(path, b"data")
        return await box.run_code("'alive'")

    assert in_box(backend, use).result == "'alive'"


def test_a_full_disk_is_the_models_mistake_and_can_be_cleared(backend):
    async def use(box: Sandbox) -> bytes:
        with pytest.raises(ToolError):
            await box.write("too-large", bytes((LIMITS.disk_mb << 20) + 1))
        await box.write("large", bytes(12 << 20))
        with pytest.raises(ToolError):
            await box.write("second", bytes(12 << 20))
        await box.exec(["rm", "-f", "large", "second"])
        await box.write("after", b"fits")
        return await box.read("after")

    assert in_box(backend, use) == b"fits"


# Isolation from each other, and limits


def test_boxes_share_nothing_and_reach_no_network(backend):
    leave = (
        "import os\nfor folder in ('/box', '/tmp', '/dev/shm'):\n"
        "    open(folder + '/trace', 'w').write('here')"
    )
    look = (
        "import glob, os\n"
        "[p for f in ('/box', '/tmp', '/dev/shm', '/run') for p in glob.glob(f + '/*')]"
    )
    connect = (
        "import socket\n"
        "try: socket.create_connection(('127.0.0.1', 80), 1)\n"
        "except OSError as error: reached = False\nelse: reached = True\nreached"
    )

    async def scenario() -> tuple[ExecResult, ExecResult, ExecResult]:
        first = await backend.backend.create(LIMITS)
        await first.run_code(leave)
        second = await backend.backend.create(LIMITS)
        during = await second.run_code(look)
        await first.close()
        third = await backend.backend.create(LIMITS)
        after, reached = await third.run_code(look), await second.run_code(connect)
        await asyncio.gather(second.close(), third.close())
        return during, after, reached

    during, after, reached = backend.run(scenario())
    assert (during.result, after.result, reached.result) == ("[]", "[]", "False")


def test_many_boxes_at_once_each_with_its_own_answer(backend):
    async def one(number: int) -> tuple[str | None, str | None]:
        box = await backend.backend.create(LIMITS)
        try:
            first = box.run_code(f"x = {number}; x ** 2")
            second = box.run_code("x + 1")  # waits for its turn, in this order
            results = await asyncio.gather(first, second)
            return results[0].result, results[1].result
        finally:
            await box.close()

    async def scenario() -> list[tuple[str | None, str | None]]:
        return await asyncio.gather(*(one(number) for number in range(12)))

    assert backend.run(scenario()) == [(str(n**2), str(n + 1)) for n in range(12)]


def test_a_box_has_the_limits_that_it_was_asked_for(backend):
    async def fill(box: Sandbox) -> ExecResult:
        return await box.run_code(
            "try: kept = bytes(100 << 20)\nexcept MemoryError: kept = b''\n"
            "try: open('f', 'wb').write(bytes(20 << 20)); full = False\n"
            "except OSError: full = True\nlen(kept) >> 20, full"
        )

    small = SandboxLimits(memory_mb=64, disk_mb=8)
    large = SandboxLimits(memory_mb=256, disk_mb=64)
    assert in_box(backend, fill, small).result == "(0, True)"
    assert in_box(backend, fill, large).result == "(100, False)"


@pytest.mark.parametrize(
    "limits",
    [
        SandboxLimits(memory_mb=0),
        SandboxLimits(max_processes=-1),
        SandboxLimits(wall_s=float("nan")),
        SandboxLimits(disk_mb=0),
    ],
    ids=["memory", "processes", "wall", "disk"],
)
def test_limits_that_would_not_limit_are_refused(backend, limits):
    with pytest.raises(ConfigError):
        backend.run(backend.backend.create(limits))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_refused_and_harms_nothing(backend, timeout_s):
    async def use(box: Sandbox) -> ExecResult:
        with pytest.raises(SandboxError, match="timeout_s"):
            await box.run_code("1", timeout_s=timeout_s)
        return await box.run_code("'alive'")

    assert in_box(backend, use).result == "'alive'"


def test_the_report_says_how_each_limit_is_held(backend):
    report = backend.backend.report()
    assert set(report.limits) >= {"wall", "cpu", "memory", "processes", "disk", "output"}
    assert all(report.limits.values()) and report.isolation


# Ends


def test_closing_is_idempotent_and_a_closed_box_says_so(backend):
    async def scenario() -> None:
        box = await backend.backend.create(LIMITS)
        await box.run_code("import subprocess; subprocess.Popen(['sleep', '600'])")
        await asyncio.gather(box.close(), box.close())
        await box.close()
        for call in (
            box.run_code("1"),
            box.exec(["true"]),
            box.run_private("", b""),
            box.read("a"),
            box.write("a", b""),
        ):
            with pytest.raises(SandboxError, match="closed"):
                await call

    backend.run(scenario())


def test_a_cancelled_call_ends_its_box_and_no_other(backend):
    async def scenario() -> ExecResult:
        box = await backend.backend.create(LIMITS)
        other = await backend.backend.create(LIMITS)
        call = asyncio.create_task(box.run_code("while True: pass", timeout_s=30))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(SandboxError):
            await box.run_code("1")
        await box.close()
        result = await other.run_code("1 + 1")
        await other.close()
        return result

    assert backend.run(scenario()).result == "2"


def test_closing_ends_a_call_that_runs(backend):
    async def scenario() -> None:
        box = await backend.backend.create(LIMITS)
        call = asyncio.create_task(box.run_code("while True: pass", timeout_s=30))
        await asyncio.sleep(0.2)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await call

    backend.deadline_s, before = 20, backend.deadline_s  # far below the deadline of the call
    backend.run(scenario())
    backend.deadline_s = before


def test_a_box_that_dies_in_a_call_is_dead_and_the_next_one_is_not(backend):
    async def scenario() -> tuple[ExecResult, ExecResult]:
        box = await backend.backend.create(LIMITS)
        marker = f"{3000 + random.random():.9f}"
        await box.run_code("kept = 1")
        call = asyncio.create_task(box.exec(["sleep", marker], timeout_s=30))
        await asyncio.sleep(0.5)
        kill_first_process(marker)
        died = await call
        with pytest.raises(SandboxError, match="died"):
            await box.run_code("1")
        await box.close()
        fresh = await backend.backend.create(LIMITS)
        healed = await fresh.run_code("'healed'")
        await fresh.close()
        return died, healed

    died, healed = backend.run(scenario())
    assert (died.status, died.state_lost) == (SandboxStatus.SANDBOX_DEAD, True), died
    assert healed.result == "'healed'"


@pytest.mark.parametrize("name", list(ARMS))
def test_lost_infrastructure_is_nobodys_fault_and_is_told_in_time(name):
    async def scenario(backend: SandboxBackend, lose: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            await backend.start()
            try:
                box = await backend.create(LIMITS)
                call = asyncio.create_task(box.run_code("while True: pass", timeout_s=40))
                await asyncio.sleep(0.2)
                await asyncio.to_thread(lose)
                with pytest.raises(SandboxError):
                    await call
                with pytest.raises(SandboxError):
                    await box.run_code("1")
                with contextlib.suppress(SandboxError):  # what cannot be confirmed may be said
                    await box.close()
            finally:
                await backend.close()
                await backend.close()
            with pytest.raises(SandboxError):
                await backend.create(LIMITS)

    try:
        with ARMS[name].open_fragile() as (backend, lose):
            asyncio.run(scenario(backend, lose))
    except ArmUnavailable as reason:
        cannot_run(f"sandbox backend {name}", reason)
