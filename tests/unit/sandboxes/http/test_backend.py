"""The client of sandbox servers, against servers that are wrong, slow, or away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from agentrl_sandboxes.http import HttpBackend

from agentrl.errors import ConfigError, SandboxError, SandboxUnavailable
from agentrl.sandbox.base import SandboxLimits
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing.json_server import Answer, JsonServer

REPORT = {
    "report": {"backend": "fake", "isolation": [], "limits": {"wall": "x"}, "warnings": []},
    "maxima": {},
    "ttl_s": 60,
}
CREATED = {"id": "n-0-x", "url": None, "limits": {}, "lowered": [], "ttl_s": 60}

Endpoint = Callable[[Any, Any], Awaitable[Answer]]


def says(status: int, value: Any) -> Endpoint:
    async def endpoint(body: Any, query: Any) -> Answer:
        return status, value

    return endpoint


def against(
    endpoints: dict[str, Endpoint], scenario: Callable[[HttpBackend, JsonServer], Awaitable[None]]
) -> None:
    async def main() -> None:
        server = JsonServer(endpoints)
        await server.start()
        backend = HttpBackend(server.url, create_timeout_s=2.0)
        try:
            async with asyncio.timeout(20):
                await scenario(backend, server)
        finally:
            await backend.close()
            await server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        says(500, "<html>Bad Gateway</html>"),
        says(502, {"error": {"type": "tool", "message": "a proxy is not the model"}}),
        says(200, "<html>Welcome to nginx!</html>"),
        says(200, []),
        says(200, {"id": 5}),
        says(201, {**CREATED, "limits": {"disk_mb": "much"}}),
        says(201, {**CREATED, "limits": {"wall_s": None}}),
        says(503, {"error": "busy"}),
        says(404, {"detail": "Not Found"}),
        says(422, {"detail": [{"loc": ["body"]}]}),
    ],
)
def test_whatever_a_broken_server_says_is_infrastructure(answer):
    async def scenario(backend: HttpBackend, server: JsonServer) -> None:
        await backend.start()
        with pytest.raises(SandboxError):
            await backend.create(SandboxLimits())
        assert [key for key, _ in server.requests].count("POST /v1/sandboxes") == 1

    against({"GET /v1/report": says(200, REPORT), "POST /v1/sandboxes": answer}, scenario)


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline():
    async def hang(body: Any, query: Any) -> Answer:
        await asyncio.sleep(3600)
        return 200, {}

    async def scenario(backend: HttpBackend, server: JsonServer) -> None:
        await backend.start()
        with pytest.raises(SandboxError, match="did not answer within"):
            await backend.create(SandboxLimits())

    against({"GET /v1/report": says(200, REPORT), "POST /v1/sandboxes": hang}, scenario)


def test_a_server_that_was_away_at_the_start_serves_once_it_is_there():
    async def main() -> None:
        server = JsonServer(
            {"GET /v1/report": says(200, REPORT), "POST /v1/sandboxes": says(201, CREATED)}
        )
        await server.start()
        port = int(server.url.rsplit(":", 1)[1])
        await server.close()
        backend = HttpBackend(f"http://127.0.0.1:{port}", create_timeout_s=0.2)
        pool = SandboxPool(backend, create_timeout_s=15.0)
        with pytest.raises(SandboxError, match="cannot reach the sandbox server"):
            await pool.acquire()
        await server.start(port)
        await pool.acquire()
        await pool.close()
        await server.close()

    asyncio.run(main())


def test_a_server_that_starts_late_is_waited_for():
    async def main() -> None:
        server = JsonServer({"GET /v1/report": says(200, REPORT)})
        await server.start()
        port = int(server.url.rsplit(":", 1)[1])
        await server.close()
        backend = HttpBackend(f"http://127.0.0.1:{port}", create_timeout_s=15.0)
        starting = asyncio.create_task(backend.start())
        await asyncio.sleep(0.3)
        assert not starting.done()
        await server.start(port)
        await starting
        assert backend.report().backend.startswith("http: fake at ")
        await backend.close()
        await server.close()

    asyncio.run(main())


def test_a_call_whose_server_vanishes_ends_the_sandbox():
    reached = asyncio.Event()

    async def scenario(backend: HttpBackend, server: JsonServer) -> None:
        await backend.start()
        box = await backend.create(SandboxLimits())
        call = asyncio.create_task(box.run_code("1"))
        await asyncio.sleep(0.1)
        await server.close()
        with pytest.raises(SandboxError):
            await call
        with pytest.raises(SandboxError, match="cannot be used any more"):
            await box.run_code("1")
        reached.set()

    async def vanish(body: Any, query: Any) -> Answer:
        await asyncio.sleep(3600)
        return 200, {}

    endpoints = {
        "GET /v1/report": says(200, REPORT),
        "POST /v1/sandboxes": says(201, CREATED),
        "POST /v1/sandboxes/n-0-x/run_code": vanish,
    }
    against(endpoints, scenario)
    assert reached.is_set()


def test_the_url_of_a_reply_is_used_from_then_on():
    async def main() -> None:
        node = JsonServer({"DELETE /v1/sandboxes/n-0-x": says(200, "")})
        await node.start()
        balancer = JsonServer(
            {
                "GET /v1/report": says(200, REPORT),
                "POST /v1/sandboxes": says(201, {**CREATED, "url": node.url}),
            }
        )
        await balancer.start()
        backend = HttpBackend(balancer.url)
        await backend.start()
        box = await backend.create(SandboxLimits())
        await box.close()
        await box.close()
        assert [key for key, _ in node.requests] == ["DELETE /v1/sandboxes/n-0-x"]
        await backend.close()
        for server in (node, balancer):
            await server.close()

    asyncio.run(main())


def test_leases_are_renewed_while_nothing_is_called():
    async def scenario(backend: HttpBackend, server: JsonServer) -> None:
        await backend.start()
        await backend.create(SandboxLimits())
        while ("POST /v1/keepalive", {"ids": ["n-0-x"]}) not in server.requests:
            await asyncio.sleep(0.01)

    endpoints = {
        "GET /v1/report": says(200, {**REPORT, "ttl_s": 0.15}),
        "POST /v1/sandboxes": says(201, CREATED),
        "POST /v1/keepalive": says(200, {"lost": []}),
        "DELETE /v1/sandboxes/n-0-x": says(200, ""),
    }
    against(endpoints, scenario)


@pytest.mark.parametrize("token", ["s3cret-value", "Bearer ${env:TOKEN}", "${TOKEN}"])
def test_a_token_written_out_is_refused_and_not_shown(token):
    with pytest.raises(ConfigError, match="reference to an environment variable") as refused:
        HttpBackend("http://127.0.0.1:1", token=token)
    assert token not in str(refused.value)


def test_a_token_that_is_not_set_or_wrong_says_what_to_do(monkeypatch):
    async def scenario(backend: HttpBackend, server: JsonServer) -> None:
        with pytest.raises(SandboxUnavailable, match="wants a token; set sandbox.kwargs.token"):
            await backend.start()
        unset = HttpBackend(server.url, token="${env:NO_SUCH_TOKEN}")
        with pytest.raises(SandboxUnavailable, match="NO_SUCH_TOKEN, which is not set"):
            await unset.start()
        monkeypatch.setenv("SUCH_TOKEN", "abc\n")
        broken = HttpBackend(server.url, token="${env:SUCH_TOKEN}")
        with pytest.raises(SandboxUnavailable, match="SUCH_TOKEN holds a line break"):
            await broken.start()
        monkeypatch.setenv("SUCH_TOKEN", "abc")
        known = HttpBackend(server.url, token="${env:SUCH_TOKEN}")
        with pytest.raises(SandboxUnavailable, match=r"refuses the token of \$\{env:SUCH_TOKEN\}"):
            await known.start()
        assert server.headers["authorization"] == "Bearer abc"
        assert "abc" not in repr(vars(known))

    refusal = {"error": {"type": "refused", "message": "no"}}
    against({"GET /v1/report": says(401, refusal)}, scenario)


@pytest.mark.parametrize("url", ["127.0.0.1:8400", "ftp://host", ""])
def test_an_address_of_another_kind_is_refused(url):
    with pytest.raises(ConfigError, match="unix://"):
        HttpBackend(url)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "http://",
        "http://[::1",
        "http://a b",
        "http://h:99999",
        "http://h/?q=1",
        "h:80",
        "",
    ],
)
def test_a_url_that_leads_nowhere_is_refused_at_once(url: str):
    with pytest.raises(ConfigError, match=r"sandbox\.kwargs\.url"):
        HttpBackend(url)


def test_a_password_in_a_url_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="not shown") as caught:
        HttpBackend("http://user:geheim@127.0.0.1:1")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("ttl_s", [0, -1, 1e300, "soon", None])
def test_a_lease_that_could_not_be_renewed_is_refused(ttl_s: Any):
    async def scenario(backend: HttpBackend, server: JsonServer) -> None:
        with pytest.raises(SandboxError, match="no sandbox server"):
            await backend.start()

    against({"GET /v1/report": says(200, {**REPORT, "ttl_s": ttl_s})}, scenario)


def test_a_node_that_a_server_names_wrongly_is_its_failure_not_the_users():
    async def scenario(backend: HttpBackend, server: JsonServer) -> None:
        await backend.start()
        with pytest.raises(SandboxError, match="named a node"):
            await backend.create(SandboxLimits())

    created = says(201, {**CREATED, "url": "http://"})
    against({"GET /v1/report": says(200, REPORT), "POST /v1/sandboxes": created}, scenario)


@pytest.mark.parametrize(
    "answer",
    [
        says(500, f"<html>{'.' * 165}Authorization: Bearer 0123456789abcdef"),
        says(503, {"error": {"type": "sandbox", "message": "for Bearer 0123456789abcdef"}}),
        says(200, f"{'.' * 85}Bearer 0123456789abcdef"),
    ],
)
def test_a_token_that_a_server_repeats_is_not_shown(
    answer: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPEATED_TOKEN", "0123456789abcdef")

    async def scenario(_: HttpBackend, server: JsonServer) -> None:
        backend = HttpBackend(server.url, token="${env:REPEATED_TOKEN}", create_timeout_s=2.0)
        with pytest.raises(SandboxError) as told:
            await backend.start()
        assert "0123" not in str(told.value)
        await backend.close()

    against({"GET /v1/report": answer}, scenario)
