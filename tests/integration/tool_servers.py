"""A tool server in a process of its own, to be called, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TOKEN, OTHER_TOKEN = "token-of-one-run-0123456789", "token-of-another-0123456789"
ENVIRON = {"TOOLS_TOKEN": TOKEN, "OTHER_TOKEN": OTHER_TOKEN}

_IMPL = '''
import asyncio, os, threading, time
from agentrl.errors import InfrastructureError, ToolError
from agentrl.tool.base import ToolReply

class Counter:
    """Counts, and writes what it counted to a file when it is closed."""
    async def open(self, context):
        self.n, self.log = context.state.get("start", 0), context.state.get("log")
    async def call(self, by: int = 1):
        if by == 13: raise ToolError("thirteen is unlucky")
        if by == 14: raise InfrastructureError("the abacus is broken")
        if by == 15: return ToolReply(content="paid", reward=0.25, cut_short=True)
        if by == 16: return "long " * 100_000
        self.n += by
        return {"n": self.n}
    async def close(self):
        if self.log:
            with open(self.log, "a") as file: file.write(f"closed {self.n}\\n")

async def wait(seconds: float = 0.0):
    await asyncio.sleep(seconds)
    return f"waited, served by {os.getpid()}"

async def block(seconds: float = 0.0):
    time.sleep(seconds)  # holds the event loop of the server
    return "blocked"
'''
_COUNTER = """
name: counter
description: Count up.
parameters: {type: object, properties: {by: {type: integer}}}
python: ./impl.py:Counter
limits: {timeout_s: 10, max_output_tokens: 32}
"""
_WAIT = """
name: NAME
description: Wait, then answer.
parameters: {type: object, properties: {seconds: {type: number}}}
python: ./impl.py:NAME
idempotent: true
limits: {timeout_s: 10}
"""


class ToolServerProcess:
    """``agentrl tools serve`` over the tools ``counter``, ``wait`` and ``block``.

    Args:
        folder: for the specs; empty.
        arguments: of the command, beside the specs.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "impl.py").write_text(_IMPL)
        (folder / "counter.yaml").write_text(_COUNTER)
        for name in ("wait", "block"):
            (folder / f"{name}.yaml").write_text(_WAIT.replace("NAME", name))
        self._folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Start, and return once it answers; on the same port as before, if there was one."""
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "agentrl.cli.main", "tools", "serve", "counter.yaml"]
        command += ["wait.yaml", "block.yaml", "--port", port, *self._arguments]
        self._process = subprocess.Popen(
            command,
            cwd=self._folder,
            env={**os.environ, **ENVIRON},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert " on http://" in line, f"the server said {line!r}"
        self.url = line.split(" on ")[1].strip()

    def kill(self) -> None:
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it as an operator does; return its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, signal_number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(signal_number)
        try:
            return process.wait(30)
        finally:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()
