"""What is E2B's own: keys, leases, and the errors of its SDK."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import httpx
import pytest
from agentrl_sandboxes.e2b import E2BBackend
from agentrl_sandboxes.e2b.backend import sdk_errors
from e2b import (
    AuthenticationException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    ServiceBusyException,
    TimeoutException,
)
from remote_sandboxes import environment_secret
from sandbox_arms import cannot_run

from agentrl.errors import ConfigError, SandboxError, SandboxUnavailable, ToolError
from agentrl.sandbox.base import SandboxLimits
from agentrl.testing.e2b_server import E2BServer, e2b_server

pytestmark = pytest.mark.timeout(120)


def with_stand_in(
    scenario: Callable[[E2BBackend, E2BServer], Awaitable[None]], ttl_s: float = 300.0
) -> None:
    key = f"e2b_{secrets.token_hex(20)}"
    with environment_secret(key) as reference:
        try:
            running = e2b_server(key)
            url, server = running.__enter__()
        except SandboxUnavailable as reason:
            cannot_run("the stand-in for E2B", reason)
        try:
            backend = E2BBackend(api_key=reference, api_url=url, sandbox_url=url, ttl_s=ttl_s)

            async def main() -> None:
                await backend.start()
                try:
                    async with asyncio.timeout(60):
                        await scenario(backend, server)
                finally:
                    await backend.close()

            asyncio.run(main())
        finally:
            running.__exit__(None, None, None)


def test_machines_live_as_long_as_their_owner_is_heard_of():
    async def scenario(backend: E2BBackend, server: E2BServer) -> None:
        kept, forgotten = [await backend.create(SandboxLimits()) for _ in range(2)]
        await kept.run_code("kept = 1")
        assert backend._boxes.popitem()[1][0] is forgotten  # as after kill -9 of its owner
        while len(server.machines) > 1:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.5)  # longer than the lease
        assert (await kept.run_code("kept")).result == "1"
        with pytest.raises(SandboxError):
            await forgotten.run_code("1")
        await backend.close()
        assert not server.machines

    with_stand_in(scenario, ttl_s=2.0)


def test_every_machine_is_killed_with_its_box_also_when_its_creation_is_cancelled():
    async def scenario(backend: E2BBackend, server: E2BServer) -> None:
        creating = asyncio.create_task(backend.create(SandboxLimits()))
        while not server.machines:
            await asyncio.sleep(0.001)
        while not creating.done() and not next(iter(server.machines.values())).processes:
            await asyncio.sleep(0.001)
        creating.cancel()
        (made,) = await asyncio.gather(creating, return_exceptions=True)
        if not isinstance(made, BaseException):  # it was quicker
            await made.close()
        box = await backend.create(SandboxLimits())
        await box.close()
        while server.machines:
            await asyncio.sleep(0.01)

    with_stand_in(scenario)


def test_inside_the_program_is_nobody_and_sees_neither_the_service_nor_its_key():
    code = (
        "import os, socket\nfound = []\n"
        "try: os.setuid(0)\nexcept OSError: found.append('not root')\n"
        "for port in (49983, 49999):\n"
        "    try: socket.create_connection(('127.0.0.1', port), 1)\n"
        "    except OSError: found.append(port)\n"
        "try: open('/opt-file', 'w')\nexcept OSError: found.append('read-only')\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if 'E2B' in open(f'/proc/{pid}/environ').read() if int(pid) > 1 else False:\n"
        "        found.append('key')\n"
        "try: open('/proc/1/environ').read()\nexcept OSError: found.append('closed')\n"
        "found"
    )

    async def scenario(backend: E2BBackend, server: E2BServer) -> None:
        box = await backend.create(SandboxLimits())
        seen = await box.run_code(code)
        assert seen.result == "['not root', 49983, 49999, 'read-only', 'closed']", seen
        await box.close()

    with_stand_in(scenario)


def test_a_wrong_key_is_refused_and_a_written_one_not_even_tried():
    with pytest.raises(ConfigError, match="reference") as refused:
        E2BBackend(api_key="e2b_written_out")
    assert "written_out" not in str(refused.value)

    async def scenario(backend: E2BBackend, server: E2BServer) -> None:
        with environment_secret("e2b_wrong") as reference:
            wrong = E2BBackend(
                api_key=reference, api_url=backend._api_url, sandbox_url=backend._sandbox_url
            )
            with pytest.raises(SandboxUnavailable, match="refuses the key"):
                await wrong.start()

    with_stand_in(scenario)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (AuthenticationException("no"), SandboxUnavailable),
        (RateLimitException("slow down"), SandboxError),
        (ServiceBusyException("later"), SandboxError),
        (TimeoutException("gone"), SandboxError),
        (NotFoundException("gone"), SandboxError),
        (SandboxException("hm"), SandboxError),
        (httpx.ConnectError("refused"), SandboxError),
        (ConnectionRefusedError("refused"), SandboxError),
        (ToolError("the model's"), ToolError),
        (asyncio.CancelledError(), asyncio.CancelledError),
    ],
)
def test_each_error_of_the_sdk_has_its_place(raised, expected):
    with pytest.raises(expected) as told, sdk_errors("do this"):
        raise raised
    assert type(told.value) is expected


@pytest.mark.parametrize("kind", [AuthenticationException, SandboxException])
def test_a_key_that_the_service_repeats_is_not_shown(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("E2B_API_KEY", "e2b_0123456789")
    with pytest.raises(SandboxError) as told, sdk_errors("do this"):
        raise kind("401: no such key: e2b_0123456789")
    assert "0123" not in str(told.value) and "${env:E2B_API_KEY}" in str(told.value)
