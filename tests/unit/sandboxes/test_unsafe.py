"""The sandbox without isolation, where whoever wants one is cancelled."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from agentrl_sandboxes.local import UnsafeBackend, unsafe

from agentrl.sandbox.base import SandboxLimits


@pytest.mark.filterwarnings("ignore:sandbox.id=none")
def test_a_start_that_is_cancelled_leaves_neither_a_folder_nor_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spawn = unsafe._spawn
    begun, may_go_on = threading.Event(), threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def slow(*arguments: Any) -> subprocess.Popen[bytes]:
        begun.set()
        assert may_go_on.wait(30)
        started.append(spawn(*arguments))
        return started[0]

    monkeypatch.setattr(unsafe, "_spawn", slow)

    async def main() -> None:
        backend = UnsafeBackend()
        await backend.start()
        creating = asyncio.ensure_future(backend.create(SandboxLimits()))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        creating.cancel()
        await asyncio.wait([creating])
        assert creating.cancelled()
        may_go_on.set()
        await backend.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(started) == 1 and started[0].poll() is not None
    assert list(tmp_path.iterdir()) == []
