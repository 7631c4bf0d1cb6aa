"""Tool calls per second through 64 connections, with 800 more waiting, against a 20 ms handler.

Clients against a bare handler, which costs next to nothing: httpx with its own pool; httpx over
aiohttp (what agentrl uses); aiohttp itself; then agentrl's ``server:`` tools, executor and all,
against that handler and against ``agentrl tools serve``. The handler or server is a process of its
own. The physical limit is 64 / 20 ms = 3,200 calls/s.

    python benchmarks/tool_client.py [--seconds 4] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from agentrl.net.client import fetch, make_client
from agentrl.testing import FakeSandboxes
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.executor import ToolExecutor
from agentrl.types import ToolCall, ToolStatus

NUM_CONNECTIONS = 64
NUM_WAITING = 800
HANDLER_S = 0.02
CALL = {"name": "wait", "arguments": {}, "timeout_s": 30.0}
REPLY = json.dumps({"status": "ok", "content": "done", "reward": 0.0, "cut_chars": 0}).encode()
TOOL = "import asyncio\n\nasync def wait():\n    await asyncio.sleep(0.02)\n    return 'done'\n"
SERVED = """
name: wait
description: Wait.
parameters: {type: object, properties: {}}
python: ./impl.py:wait
limits: {concurrency: 4096, max_calls: 1000000}
"""
REMOTE = """
name: wait
description: Wait.
parameters: {{type: object, properties: {{}}}}
server: {{url: {url}, tool: wait}}
limits: {{timeout_s: 60, concurrency: {connections}, max_calls: 1000000}}
"""

One = Callable[[], Awaitable[None]]
"""Makes one call."""


# ----------------------------------------------------------------------------- the other side


class Handler(asyncio.Protocol):
    """Answers every request after 20 ms, whatever it asks; HTTP to the letter it needs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        if len(rest) < length:
            return
        self._data = b""
        is_call = b"/calls" in head.split(b"\r\n")[0]
        body = REPLY if is_call else b'{"session": "s"}'
        answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        loop = asyncio.get_running_loop()
        delay_s = HANDLER_S if is_call else 0.0
        loop.call_later(delay_s, self._transport.write, answer % len(body) + body)


async def serve_handler() -> None:
    server = await asyncio.get_running_loop().create_server(Handler, "127.0.0.1", 0, backlog=4096)
    print(f"serving on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextmanager
def process(command: list[str], folder: Path) -> Iterator[tuple[str, int]]:
    """Run what serves; give its URL and its process id."""
    started = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        yield started.stdout.readline().split(" on ")[1].strip(), started.pid
    finally:
        started.kill()
        started.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ----------------------------------------------------------------------------- arms


@asynccontextmanager
async def plain_httpx(url: str) -> AsyncIterator[list[One]]:
    limits = httpx.Limits(max_connections=NUM_CONNECTIONS)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def one() -> None:
            (await client.post(f"{url}/v1/sessions/s/calls", json=CALL)).json()

        yield [one] * (NUM_CONNECTIONS + NUM_WAITING)


@asynccontextmanager
async def httpx_over_aiohttp(url: str) -> AsyncIterator[list[One]]:
    client = make_client(None, max_connections=NUM_CONNECTIONS)

    async def one() -> None:
        path = f"{url}/v1/sessions/s/calls"
        answer = await fetch(client, "POST", path, json=CALL, timeout_s=60, max_bytes=100_000)
        json.loads(answer.body)

    yield [one] * (NUM_CONNECTIONS + NUM_WAITING)
    await client.aclose()


@asynccontextmanager
async def raw_aiohttp(url: str) -> AsyncIterator[list[One]]:
    connector = aiohttp.TCPConnector(limit=NUM_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one() -> None:
            async with session.post(f"{url}/v1/sessions/s/calls", json=CALL) as response:
                await response.json()

        yield [one] * (NUM_CONNECTIONS + NUM_WAITING)


@asynccontextmanager
async def tools_of_a_server(url: str) -> AsyncIterator[list[One]]:
    """One trajectory for each call at a time, with an executor and a session of its own."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "wait.yaml"
        spec.write_text(REMOTE.format(url=url, connections=NUM_CONNECTIONS))
        toolbox = Toolbox([str(spec)])
    call = ToolCall(name="wait", arguments={})

    def executor(index: int) -> ToolExecutor:
        async def context(name: str) -> ToolContext:
            return ToolContext(trajectory_id=f"t{index}", seed=index, sandboxes=FakeSandboxes())

        return ToolExecutor(toolbox, make_context=context, cut=lambda text, limit: (text, 0))

    async def one(trajectory: ToolExecutor) -> None:
        result = await trajectory.run(call)
        assert result.status is ToolStatus.OK, result.content

    trajectories = [executor(index) for index in range(NUM_CONNECTIONS + NUM_WAITING)]
    for trajectory in trajectories:  # sessions are opened once a trajectory, not for every call
        assert await trajectory.open("wait") is None
    yield [lambda trajectory=trajectory: one(trajectory) for trajectory in trajectories]
    await asyncio.gather(*(trajectory.close() for trajectory in trajectories))


async def measure(ones: list[One], seconds: float, pid: int) -> dict[str, float]:
    """Calls per second, with as many in progress as there are callers, and what each cost."""
    done = 0
    running = True

    async def caller(one: One) -> None:
        nonlocal done
        while running:
            await one()
            done += running  # those that end after the time do not count

    tasks = [asyncio.create_task(caller(one)) for one in ones]
    await asyncio.sleep(min(1.0, seconds / 4))  # until connections are there
    before, start = done, time.perf_counter()
    client_s, server_s = time.process_time(), cpu_s(pid)
    await asyncio.sleep(seconds)
    num_calls = done - before
    measured = {
        "calls_per_s": num_calls / (time.perf_counter() - start),
        "client_ms": 1e3 * (time.process_time() - client_s) / max(num_calls, 1),
        "server_ms": 1e3 * (cpu_s(pid) - server_s) / max(num_calls, 1),
    }
    running = False
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--handler", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.handler:
        asyncio.run(serve_handler())
        return
    logging.disable(logging.WARNING)
    me = [sys.executable, str(Path(__file__).resolve())]
    serve = [sys.executable, "-m", "agentrl.cli.main", "tools", "serve", "wait.yaml"]
    handler, server = [*me, "--handler"], [*serve, "--port", "0"]
    arms: dict[str, tuple[Any, list[str]]] = {
        "httpx, its own pool": (plain_httpx, handler),
        "httpx over aiohttp": (httpx_over_aiohttp, handler),
        "aiohttp": (raw_aiohttp, handler),
        "server: tool, bare handler": (tools_of_a_server, handler),
        "server: tool, agentrl tools serve": (tools_of_a_server, server),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in arms}

    async def one_arm(arm: Any, url: str, pid: int) -> dict[str, float]:
        async with arm(url) as ones:
            return await measure(ones, options.seconds, pid)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "impl.py").write_text(TOOL)
        (Path(folder) / "wait.yaml").write_text(SERVED)
        for _ in range(options.rounds):
            for name, (arm, command) in arms.items():
                with process(command, Path(folder)) as (url, pid):
                    rounds[name].append(asyncio.run(one_arm(arm, url, pid)))
    limit = NUM_CONNECTIONS / HANDLER_S
    rows = {
        name: {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        for name, measured in rounds.items()
    }
    if options.json:
        print(json.dumps({"limit_calls_per_s": limit, "arms": rows, "rounds": rounds}))
        return
    print(f"physical limit: {limit:,.0f} calls/s\n")
    print("| arm | calls/s | client, CPU ms a call | server, CPU ms a call |\n|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['calls_per_s']:,.0f} | {row['client_ms']:.2f} | "
            f"{row['server_ms']:.2f} |"
        )


if __name__ == "__main__":
    main()
