"""`docker compose up`: the contract of sandboxes through it, and the tool server beside it."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from agentrl_sandboxes.http import HttpBackend
from composed import Composed, composed
from sandbox_arms import ArmUnavailable, StartedBackend, cannot_run

pytest.register_assert_rewrite("test_sandbox_backends")
from test_sandbox_backends import *  # noqa: E402, F403

# Takes the arms' infrastructure away; that of compose is the same server.
del test_lost_infrastructure_is_nobodys_fault_and_is_told_in_time  # noqa: F821

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def servers() -> Iterator[Composed]:
    """Both servers, once for this file."""
    try:
        with composed() as running:
            yield running
    except ArmUnavailable as reason:
        cannot_run("compose", reason)


@pytest.fixture(scope="module")
def backend(servers: Composed) -> Iterator[StartedBackend]:
    """The sandbox server that compose has brought up: in the place of the arms."""
    with asyncio.Runner() as runner:
        remote = HttpBackend(servers.sandboxes_url, token=servers.sandboxes_token)
        arm = StartedBackend(name="compose", backend=remote, runner=runner)
        try:
            arm.run(remote.start())
            yield arm
        finally:
            arm.run(remote.close())


def ask(url: str, reference: str | None = None, body: object = None) -> str:
    """Ask a server; the reference names its token's variable."""
    token = {} if reference is None else {"Authorization": f"Bearer {os.environ[reference[6:-1]]}"}
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **token},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def test_a_tool_of_the_tool_server_runs_in_the_sandbox_server(servers):
    session = json.loads(ask(f"{servers.tools_url}/v1/sessions", servers.tools_token, {"seed": 0}))
    url = f"{servers.tools_url}/v1/sessions/{session['session']}/calls"
    call = {"name": "python", "arguments": {"code": "import os; 6 * 7, os.getcwd()"}}
    answer = ask(url, servers.tools_token, call)
    assert "(42, '/box')" in json.dumps(json.loads(answer)), answer
    counted = ask(f"{servers.sandboxes_url}/metrics", servers.sandboxes_token)
    assert 'operation="run_code",outcome="ok"' in counted
    assert counted.count("agentrl_sandbox_worker_up{") == 2


def test_servers_run_as_an_ordinary_user_with_no_rights(servers):
    for service in ("sandboxes", "tools"):
        name = servers.compose("ps", "-q", service, timeout_s=30).strip()
        (seen,) = json.loads(servers.docker("inspect", name))
        assert seen["State"]["Health"]["Status"] == "healthy"
        assert seen["Config"]["User"] == "1000:1000"
        assert seen["HostConfig"]["CapDrop"] == ["ALL"] and seen["HostConfig"]["ReadonlyRootfs"]
        assert "no-new-privileges:true" in seen["HostConfig"]["SecurityOpt"]
        assert not seen["HostConfig"]["Privileged"] and not seen["HostConfig"]["CapAdd"]


def test_without_a_token_only_health_answers(servers):
    assert json.loads(ask(f"{servers.sandboxes_url}/health"))["status"] == "ok"
    for path in ("/metrics", "/v1/report"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(f"{servers.sandboxes_url}{path}")
