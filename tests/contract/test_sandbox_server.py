"""The sandbox server as processes: what dies, what is replaced, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from agentrl_sandboxes.http import HttpBackend
from remote_sandboxes import ServingProcess, serving

from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxLimits

pytestmark = pytest.mark.timeout(180)

LIMITS = SandboxLimits(wall_s=30.0)


def with_backend(
    server: ServingProcess, scenario: Callable[[HttpBackend], Awaitable[None]]
) -> None:
    async def main() -> None:
        backend = server.backend()
        await backend.start()
        try:
            async with asyncio.timeout(90):
                await scenario(backend)
        finally:
            await backend.close()

    asyncio.run(main())


def workers_of(pid: int) -> dict[int, int]:
    """Process of each worker of a server."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        number = re.search(rb'"worker": (\d+)', Path(f"/proc/{child}/cmdline").read_bytes())
        if number is not None:
            found[int(number[1])] = int(child)
    return found


def descendants(pid: int) -> set[int]:
    """Children of all threads, and theirs."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found |= {int(child), *descendants(int(child))}
    return found


def still_there(pids: set[int]) -> set[int]:
    """Those that have not ended, with or without somebody to reap them."""
    there = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            there.add(pid)
    return there


def until_gone(pids: set[int], deadline_s: float = 20.0) -> set[int]:
    end = time.monotonic() + deadline_s
    while still_there(pids) and time.monotonic() < end:
        time.sleep(0.05)
    return still_there(pids)


async def metric(server: ServingProcess, name: str) -> float:
    """Sum of a family over workers and labels."""
    headers = {"Authorization": f"Bearer {os.environ[server.token[6:-1]]}"}
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"{server.url}/metrics", headers=headers)).text
    values = re.findall(rf"^agentrl_sandbox_{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, values))


async def until(value: float, server: ServingProcess, name: str) -> None:
    while await metric(server, name) != value:
        await asyncio.sleep(0.1)


def test_a_worker_that_dies_takes_its_own_boxes_along_and_is_replaced():
    with serving("--workers", "2") as server:

        async def scenario(backend: HttpBackend) -> None:
            boxes = [await backend.create(LIMITS) for _ in range(4)]
            for box in boxes:
                await box.run_code("kept = 'alive'")
            own = [box for box in boxes if box._id.split("-")[1] == "0"]
            others = [box for box in boxes if box not in own]
            assert (len(own), len(others)) == (2, 2)
            busy = asyncio.create_task(own[0].run_code("while True: pass"))
            await asyncio.sleep(0.3)
            os.kill(workers_of(server.process.pid)[0], signal.SIGKILL)
            with pytest.raises(SandboxError):
                await busy
            with pytest.raises(SandboxError):
                await own[1].run_code("kept")
            assert [(await box.run_code("kept")).result for box in others] == ["'alive'"] * 2
            for box in boxes:  # also those that are gone: closed is closed
                await box.close()
            await until(1, server, "restarts_total")
            fresh = [await backend.create(LIMITS) for _ in range(4)]
            results = await asyncio.gather(*(box.run_code("6 * 7") for box in fresh))
            assert [result.result for result in results] == ["42"] * 4

        with_backend(server, scenario)


def test_boxes_of_a_client_that_is_gone_are_closed_and_a_call_that_is_given_up_is_stopped():
    with serving("--workers", "2", "--ttl-s", "1.5") as server:

        async def vanish(backend: HttpBackend) -> None:
            await asyncio.gather(*(backend.create(LIMITS) for _ in range(3)))
            backend._boxes.clear()  # neither renewed nor closed: as after kill -9

        async def scenario(backend: HttpBackend) -> None:
            kept = await backend.create(LIMITS)
            await kept.run_code("kept = 'alive'")
            await until(3, server, "reaped_total")
            assert await metric(server, "open") == 1
            assert (await kept.run_code("kept")).result == "'alive'"
            given_up = asyncio.create_task(kept.run_code("while True: pass"))
            await asyncio.sleep(0.3)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            with pytest.raises(SandboxError, match="cannot be used"):
                await kept.run_code("1")
            outcome = 'calls_total{worker="[01]",operation="run_code",outcome="cancelled"}'
            while await metric(server, re.sub(r"([{}])", r"\\\1", outcome)) != 1:
                await asyncio.sleep(0.1)

        with_backend(server, vanish)
        with_backend(server, scenario)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_leaves_no_process_behind(number):
    with serving("--workers", "2") as server:

        async def scenario(backend: HttpBackend) -> None:
            boxes = [await backend.create(LIMITS) for _ in range(2)]
            code = "while True: pass" if number == signal.SIGKILL else "import time; time.sleep(1)"
            calls = [asyncio.create_task(box.run_code(code)) for box in boxes]
            await asyncio.sleep(0.3)
            processes = {server.process.pid, *descendants(server.process.pid)}
            assert len(processes) > 8
            (worker, *_) = workers_of(server.process.pid).values()
            task = Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[-2]
            folder = Path(json.loads(task)["folder"])
            assert folder.is_dir()
            server.process.send_signal(number)
            ended = await asyncio.gather(*calls, return_exceptions=True)
            if number == signal.SIGKILL:
                assert all(isinstance(end, SandboxError) for end in ended), ended
            else:  # told to stop, it lets short calls end
                assert not any(isinstance(end, BaseException) for end in ended), ended
            await asyncio.to_thread(server.process.wait, 40)
            assert await asyncio.to_thread(until_gone, processes) == set()
            assert not folder.exists()

        with_backend(server, scenario)


def test_a_unix_socket_serves_as_well(tmp_path):
    path = tmp_path / "boxes.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.main", "sandbox", "serve", "--uds", str(path)],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "AGENTRL_SANDBOX_TOKEN"},
    )
    try:
        assert process.stdout is not None
        assert str(path).encode() in process.stdout.readline()

        async def main() -> None:
            backend = HttpBackend(f"unix://{path}")
            await backend.start()
            box = await backend.create(LIMITS)
            data = os.urandom(8 << 20)
            await box.write("data.bin", data)
            assert await box.read("data.bin") == data
            await backend.close()

        asyncio.run(main())
    finally:
        process.terminate()
        process.wait(40)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(
    ("options", "token", "reason"),
    [
        (["--host", "0.0.0.0"], "", "refusing to listen on 0.0.0.0 without a token"),
        (["--host", "::"], "", "without a token"),
        ([], "short", "has 5 characters"),
        (["--backend-kwargs", "{"], "", "--backend-kwargs is no JSON"),
        (["--backend-kwargs", '{"idle": 1}'], "", "takes no such argument"),
        (["--backend", "lokal"], "", "lokal"),
        (["--max-limits", '{"memory": 1}'], "", "unknown limit 'memory'"),
        (["--workers", "0"], "", "workers must be above 0"),
        (["--uds", "/no/such/folder/x.sock"], "", "cannot listen on"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(options, token, reason):
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "sandbox", "serve", "--port", "0", *options],
        env={**os.environ, "AGENTRL_SANDBOX_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
