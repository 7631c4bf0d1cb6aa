"""The local backend as a trajectory uses it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from agentrl_sandboxes.local import LocalBackend, UnsafeBackend, launcher
from host_state import alive, descendants, list_local

from agentrl.errors import SandboxError, SandboxUnavailable, ToolError
from agentrl.sandbox.base import Sandbox, SandboxBackend, SandboxLimits, SandboxStatus
from agentrl.sandbox.pool import SandboxPool

LIMITS = SandboxLimits(wall_s=2.0)
T = TypeVar("T")


def run_scenario(scenario: Callable[[LocalBackend], Awaitable[T]], deadline_s: float = 60.0) -> T:
    """Run a scenario on a backend of its own; the host must look as before afterwards."""

    async def main() -> T:
        backend = LocalBackend()
        before = descendants()
        async with asyncio.timeout(deadline_s):
            await backend.start()
            try:
                result = await scenario(backend)
                ours = descendants() - before
                assert ours, "the boxes are processes below this one"
            finally:
                await backend.close()
        assert not alive(ours)
        return result

    asyncio.run(asyncio.sleep(0))  # what a first loop leaves open is none of the backend's
    before = list_local()
    result = asyncio.run(main())
    assert list_local() == before
    return result


def test_a_cell_keeps_names_and_shows_its_trailing_expression():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        first = await box.run_code("a = 20\nprint('hello')\na + 1")
        second = await box.run_code("def twice(x):\n    return 2 * x\ntwice(a)")
        third = await box.run_code("a = None\na")
        return first, second, third

    first, second, third = run_scenario(scenario)
    assert (first.status, first.stdout, first.result) == (SandboxStatus.OK, "hello\n", "21")
    assert second.result == "40"
    assert (third.status, third.result) == (SandboxStatus.OK, None)


def test_an_exception_is_a_status_with_the_programs_own_frames():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        await box.run_code("def f(x):\n    return 1 / x")
        failed = await box.run_code("f(0)")
        broken = await box.run_code("for")
        return failed, broken, await box.run_code("f(1)")

    failed, broken, after = run_scenario(scenario)
    assert failed.status is SandboxStatus.ERROR
    assert failed.error is not None and failed.error.endswith("ZeroDivisionError: division by zero")
    assert "return 1 / x" in failed.error and "interpreter.py" not in failed.error
    assert broken.status is SandboxStatus.ERROR and "SyntaxError" in (broken.error or "")
    assert after.result == "1.0"


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "keeps_state"),
    [
        ("import sys; sys.exit(0)", SandboxStatus.OK, 0, True),
        ("import sys; sys.exit(3)", SandboxStatus.ERROR, 3, True),
        ("raise SystemExit('why')", SandboxStatus.ERROR, 1, True),
        ("import os; os._exit(0)", SandboxStatus.STATE_LOST, 0, False),
        ("import os; os._exit(7)", SandboxStatus.STATE_LOST, 7, False),
        ("import os; os.kill(os.getpid(), 9)", SandboxStatus.STATE_LOST, -9, False),
        ("import os; os.execv('/bin/true', ['true'])", SandboxStatus.STATE_LOST, 0, False),
        ("import ctypes; ctypes.string_at(8)", SandboxStatus.STATE_LOST, -11, False),
        (
            "import os\nif os.fork() == 0: raise KeyError\nos.wait()[1] > 0",
            SandboxStatus.OK,
            None,
            True,
        ),
    ],
)
def test_every_way_to_end_a_cell_has_its_status(code, status, exit_code, keeps_state):
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        await box.run_code("kept = 1")
        return await box.run_code(code), await box.run_code("kept")

    ended, after = run_scenario(scenario)
    assert (ended.status, ended.exit_code) == (status, exit_code)
    assert ended.state_lost is not keeps_state
    assert (after.status is SandboxStatus.OK) is keeps_state


def test_a_time_out_interrupts_first_and_keeps_names():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        await box.run_code("kept = 1")
        late = await box.run_code("print('before', flush=True)\nwhile True: pass", timeout_s=0.3)
        return late, await box.run_code("kept")

    late, after = run_scenario(scenario)
    assert late.status is SandboxStatus.TIMEOUT and not late.state_lost
    assert late.stdout == "before\n"
    assert after.result == "1"


def test_a_private_program_replies_where_no_output_can_reach():
    source = (
        "import os\nos.write(1, b'forged')\nprint('noise')\nreply(PAYLOAD.upper())\nreply(b'!')"
    )

    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        await box.run_code("kept = 5")
        private = await box.run_private(source, b"secret")
        return private, await box.run_code("kept, 'PAYLOAD' in globals()")

    private, after = run_scenario(scenario)
    assert (private.status, private.private) == (SandboxStatus.OK, b"SECRET!")
    assert private.stdout == "forgednoise\n"
    assert after.result == "(5, False)"


def test_commands_get_stdin_and_return_their_exit_code():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        data = bytes(range(256)) * 1000
        counted = await box.exec(["wc", "-c"], stdin=data)
        failed = await box.exec(["sh", "-c", "echo out; echo err >&2; exit 5"])
        missing = await box.exec(["no-such-program"])
        unread = await box.exec(["true"], stdin=data)
        late = await box.exec(["sleep", "60"], timeout_s=0.2)
        with pytest.raises(ToolError):
            await box.exec(["echo", "a\0b"])
        return counted, failed, missing, unread, late

    counted, failed, missing, unread, late = run_scenario(scenario)
    assert (counted.status, counted.stdout.strip()) == (SandboxStatus.OK, "256000")
    assert (failed.status, failed.exit_code) == (SandboxStatus.ERROR, 5)
    assert (failed.stdout, failed.stderr) == ("out\n", "err\n")
    assert missing.exit_code == 127 and "No such file" in missing.stderr
    assert unread.status is SandboxStatus.OK
    assert late.status is SandboxStatus.TIMEOUT


def test_files_go_in_and_come_out():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        data = os.urandom(300_000)
        await box.write("deep/er/file.bin", data)
        assert await box.read("deep/er/file.bin") == data
        assert await box.read("/box/deep/er/file.bin") == data
        await box.write("/tmp/scratch.txt", b"x")
        await box.write("helper.py", b"def triple(x): return 3 * x")
        for path in ("absent", "deep", ""):
            with pytest.raises(ToolError):
                await box.read(path)
        return await box.run_code(
            "import helper; helper.triple(2), open('/tmp/scratch.txt').read()"
        )

    assert run_scenario(scenario).result == "(6, 'x')"


def test_many_boxes_at_once_each_with_its_own_answer():
    async def scenario(backend: LocalBackend):
        async def one(number: int) -> str | None:
            box = await backend.create(LIMITS)
            try:
                return (await box.run_code(f"{number} ** 2")).result
            finally:
                await box.close()

        return await asyncio.gather(*(one(number) for number in range(64)))

    assert run_scenario(scenario) == [str(number**2) for number in range(64)]


def test_closing_is_idempotent_and_a_closed_box_says_so():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        await asyncio.gather(box.close(), box.close())
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.run_code("1")

    run_scenario(scenario)


def test_a_cancelled_call_ends_its_box_and_no_other():
    async def scenario(backend: LocalBackend):
        box, other = await backend.create(LIMITS), await backend.create(LIMITS)
        call = asyncio.create_task(box.run_code("while True: pass", timeout_s=30))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(SandboxError, match="cannot be used"):
            await box.run_code("1")
        await box.close()
        return await other.run_code("1 + 1")

    assert run_scenario(scenario).result == "2"


def test_a_dead_zygote_is_an_infrastructure_error_and_is_replaced():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        call = asyncio.create_task(box.run_code("while True: pass", timeout_s=30))
        await asyncio.sleep(0.1)
        assert backend._zygote is not None
        os.kill(backend._zygote.inner_pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="has died"):
            await call
        await box.close()
        fresh = await backend.create(LIMITS)
        assert backend.zygote_restarts == 1
        return await fresh.run_code("'healed'")

    assert run_scenario(scenario).result == "'healed'"


def test_a_box_whose_first_process_dies_is_not_blamed_on_infrastructure():
    async def scenario(backend: LocalBackend):
        box = await backend.create(LIMITS)
        call = asyncio.create_task(box.run_code("while True: pass", timeout_s=30))
        await asyncio.sleep(0.1)
        box._kill()
        return await call

    assert run_scenario(scenario).status is SandboxStatus.SANDBOX_DEAD


def test_the_report_holds_what_the_kernel_says():
    async def scenario(backend: LocalBackend):
        return backend.report()

    report = run_scenario(scenario)
    for kind in ("user", "pid", "mnt", "net", "ipc", "uts"):
        assert f"{kind} namespace" in report.isolation
    assert {"seccomp filter", "no new privileges", "no capabilities"} <= set(report.isolation)
    assert "size=32768k" in report.limits["disk"]
    assert ("cgroup" in report.limits["memory"]) != bool(report.warnings)


_HOST = """
import asyncio, sys
from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.local import LocalBackend
from host_state import descendants

async def main():
    backend = LocalBackend()
    await backend.start()
    box = await backend.create(SandboxLimits())
    running = asyncio.create_task(box.run_code("import time; time.sleep(600)", timeout_s=900))
    await asyncio.sleep(0.3)
    print(sorted(descendants()), flush=True)
    await running

asyncio.run(main())
"""


def test_a_killed_host_takes_every_box_along():
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert host.stdout is not None
    processes = set(eval(host.stdout.readline()))  # our own child's output
    assert len(processes) >= 4, "bubblewrap, zygote, supervisor, interpreter"
    host.kill()
    host.wait()
    host.stdout.close()
    end = time.monotonic() + 10
    while alive(processes) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(processes)


@pytest.mark.skipif(os.geteuid() != 0, reason="shows what root's boxes run as")
def test_boxes_of_root_do_not_run_as_root():
    async def scenario(backend: LocalBackend):
        await backend.create(LIMITS)
        assert backend._zygote is not None
        status = Path(f"/proc/{backend._zygote.inner_pid}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("Uid:"))

    assert "0" not in run_scenario(scenario).split()[1:]


_ORDINARY = """
import asyncio, os, sys
sys.path[:0] = sys.argv[1:]
from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.local import LocalBackend

async def main():
    backend = LocalBackend()
    await backend.start()
    box = await backend.create(SandboxLimits())
    result = await box.run_code("6 * 7")
    print(os.geteuid(), result.status, result.result, len(backend.report().isolation))
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not Path("/usr/bin/python3.11").exists(), reason="needs a system Python 3.11")
def test_an_ordinary_user_can_run_boxes():
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        for source in (root / "agentrl", root / "sandboxes" / "agentrl_sandboxes"):
            shutil.copytree(source, Path(name, source.name))
        done = subprocess.run(
            ["/usr/bin/python3.11", "-B", "-c", _ORDINARY, name],
            user=12345,
            group=12345,
            extra_groups=[],
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout.split()[:3] == ["12345", "ok", "42"], done.stderr


def test_a_missing_bubblewrap_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(launcher.shutil, "which", lambda _: None)
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SandboxUnavailable, match=r"install (-y )?bubblewrap"):
        asyncio.run(LocalBackend().start())


def test_a_bubblewrap_that_fails_is_refused_with_its_own_words(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o005 == 0:
            folder.chmod(0o755)
    broken.chmod(0o755)
    monkeypatch.setattr("agentrl_sandboxes.local.backend.find_bwrap", lambda: str(broken))
    with pytest.raises(SandboxUnavailable, match="No permissions.*sysctl"):
        asyncio.run(LocalBackend().start())


def test_the_pool_closes_boxes_whatever_happens_inside():
    async def scenario(backend: LocalBackend):
        pool = SandboxPool(backend, max_open=2)
        with pytest.raises(RuntimeError):
            async with pool.box(LIMITS) as box:
                await box.run_code("1")
                raise RuntimeError
        return pool.counts

    counts = run_scenario(scenario)
    assert (counts.created, counts.closed, counts.leaked) == (1, 1, 0)


def test_without_isolation_the_protocol_is_the_same_and_each_start_warns():
    async def main():
        backend: SandboxBackend = UnsafeBackend()
        with pytest.warns(RuntimeWarning, match="sandbox.id=none"):
            await backend.start()
        try:
            assert backend.report().warnings and not backend.report().isolation
            box: Sandbox = await backend.create(LIMITS)
            await box.run_code("kept = 3")
            shown = await box.run_code("kept")
            late = await box.run_code("while True: pass", timeout_s=0.2)
            await box.write("a.txt", b"text")
            listed = await box.exec(["ls"])
            with pytest.raises(ToolError):
                await box.read("../../../etc/passwd")
            child = await box.run_code("import subprocess; subprocess.Popen(['sleep', '987']).pid")
            await box.close()
            return shown, late, listed, int(child.result or 0)
        finally:
            await backend.close()

    shown, late, listed, child = asyncio.run(main())
    assert (shown.result, late.status, listed.stdout) == ("3", SandboxStatus.TIMEOUT, "a.txt\n")
    cmdline = Path(f"/proc/{child}/cmdline")
    assert not cmdline.exists() or b"987" not in cmdline.read_bytes()
