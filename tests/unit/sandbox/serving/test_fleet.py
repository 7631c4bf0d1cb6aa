"""The parent of a server's workers, where the system has no room for another process."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.serving.fleet import Fleet
from agentrl.sandbox.serving.settings import ServingSettings


def test_a_worker_that_cannot_be_started_now_is_tried_again_and_costs_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def refused(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def main() -> None:
        with socket.socket() as listening:
            fleet = Fleet(ServingSettings(), listening)
            monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
            before = set(os.listdir("/proc/self/fd"))
            # What the keeper of a worker takes for a start that failed, and tries again.
            with pytest.raises(SandboxUnavailable, match="temporarily unavailable"):
                await fleet._start(str(tmp_path), listening.fileno(), 0, 1)
            assert set(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())
