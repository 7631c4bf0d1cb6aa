"""One worker's application, without processes: who is let in, and what is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest

from agentrl.errors import ConfigError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxReport, SandboxStatus
from agentrl.sandbox.registry import sandbox_registry
from agentrl.sandbox.serving import wire
from agentrl.sandbox.serving.app import create_app
from agentrl.sandbox.serving.service import SandboxService
from agentrl.sandbox.serving.settings import ServingSettings
from agentrl.testing.sandboxes import FakeSandbox, FakeSandboxes

TOKEN = "a-token-that-is-long"


class FakeBackend:
    """Boxes that answer with the code they were given; some words make them fail."""

    def __init__(self) -> None:
        self.fakes = FakeSandboxes(self.answer)

    def answer(self, code: str) -> ExecResult:
        if code == "the model's fault":
            raise ToolError("told to the model")
        if code == "our fault":
            raise SandboxError("lost")
        return ExecResult(status=SandboxStatus.OK, stdout=code, private=b"\0\xff")

    async def start(self) -> None: ...

    async def create(self, limits: SandboxLimits) -> FakeSandbox:
        return await self.fakes.acquire(limits)

    async def close(self) -> None: ...

    def report(self) -> SandboxReport:
        return SandboxReport(backend="fake")


sandbox_registry.register("fake-for-serving")(FakeBackend)


def served(
    scenario: Callable[[httpx.AsyncClient, SandboxService], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    token: str | None = TOKEN,
    settings: ServingSettings | None = None,
) -> None:
    monkeypatch.setenv("SERVING_TOKEN", TOKEN)
    settings = settings or ServingSettings(
        backend="fake-for-serving", token_env="SERVING_TOKEN", maxima=SandboxLimits(wall_s=10.0)
    )

    async def main() -> None:
        service = SandboxService(settings)
        await service.start()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", headers=headers
        ) as client:
            try:
                await scenario(client, service)
            finally:
                await service.close()

    asyncio.run(main())


async def open_box(client: httpx.AsyncClient, **limits: float) -> dict:
    answer = await client.post("/v1/sandboxes", json={"limits": limits})
    assert answer.status_code == 201, answer.text
    return answer.json()


def frame(code: str, **request: object) -> bytes:
    return wire.pack(dict(request), code.encode())


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", "ä" * 20])
@pytest.mark.parametrize("place", ["POST /v1/sandboxes", "GET /v1/report", "GET /metrics"])
def test_without_the_token_nothing_is_done(monkeypatch, token, place):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        method, path = place.split()
        own = {} if token is None else {b"Authorization": f"Bearer {token}".encode()}
        answer = await client.request(method, path, headers=own)
        assert answer.status_code == 401 and TOKEN not in answer.text
        assert (await client.get("/health")).status_code == 200
        assert service.snapshot()["created"] == 0

    served(scenario, monkeypatch, token=None)


def test_a_box_is_created_used_and_closed_twice(monkeypatch):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        created = await open_box(client, wall_s=99.0, memory_mb=64)
        assert created["limits"]["wall_s"] == 10 and created["limits"]["memory_mb"] == 64
        assert len(created["lowered"]) == 1 and "wall_s" in created["lowered"][0]
        url = f"/v1/sandboxes/{created['id']}"
        answer = await client.post(f"{url}/run_code", content=frame("1 + 1", timeout_s=2))
        result = wire.unpack_result(answer.content)
        assert (result.stdout, result.private) == ("1 + 1", b"\0\xff")
        for _ in range(2):
            assert (await client.delete(url)).status_code == 204
        gone = await client.post(f"{url}/run_code", content=frame("1"))
        assert (gone.status_code, gone.json()["error"]["type"]) == (404, "unknown")

    served(scenario, monkeypatch)


@pytest.mark.parametrize(
    ("operation", "content", "status", "kind"),
    [
        ("run_code", frame("the model's fault"), 422, "tool"),
        ("run_code", frame("our fault"), 503, "sandbox"),
        ("run_code", b"no frame", 400, "config"),
        ("run_code", frame("1", timeout_s=11), 400, "config"),
        ("run_code", frame("1", timeout_s="soon"), 400, "config"),
        ("exec", frame("", argv="ls -l"), 400, "config"),
        ("exec", frame("", argv=["ls", 1]), 400, "config"),
        ("read", frame(""), 400, "config"),
        ("format_disk", frame(""), 404, "refused"),
    ],
)
def test_each_failure_has_its_kind(monkeypatch, operation, content, status, kind):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        box_id = (await open_box(client))["id"]
        answer = await client.post(f"/v1/sandboxes/{box_id}/{operation}", content=content)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), answer.text
        after = await client.post(f"/v1/sandboxes/{box_id}/run_code", content=frame("still here"))
        assert wire.unpack_result(after.content).stdout == "still here"

    served(scenario, monkeypatch)


def test_what_is_too_long_is_refused_before_it_is_read_whole(monkeypatch):
    settings = ServingSettings(backend="fake-for-serving", token_env="SERVING_TOKEN", max_body_mb=1)

    async def endless():
        while True:
            yield b"x" * 65536

    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        url = f"/v1/sandboxes/{(await open_box(client))['id']}/write"
        announced = await client.post(url, content=bytes(2 << 20))
        assert announced.status_code == 413
        assert (await client.post(url, content=endless())).status_code == 413

    served(scenario, monkeypatch, settings=settings)


@pytest.mark.parametrize("box_id", ["x", "0-0-0", "..-0-x", "%2e%2e-0-a"])
def test_an_id_of_another_server_says_what_may_be_wrong(monkeypatch, box_id):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        answer = await client.post(f"/v1/sandboxes/{box_id}/run_code", content=frame("1"))
        assert answer.status_code == 404 and "--advertise-url" in answer.text
        lost = await client.post("/v1/keepalive", json={"ids": [box_id]})
        assert lost.json() == {"lost": [box_id]}

    served(scenario, monkeypatch)


def test_metrics_count_calls_by_their_outcome(monkeypatch):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        url = f"/v1/sandboxes/{(await open_box(client))['id']}/run_code"
        for code in ("1", "2", "the model's fault", "our fault"):
            await client.post(url, content=frame(code))
        page = (await client.get("/metrics")).text
        for outcome, count in (("ok", 2), ("refused", 1), ("failed", 1)):
            assert f'operation="run_code",outcome="{outcome}"}} {count}\n' in page
        assert 'agentrl_sandbox_open{worker="0"} 1\n' in page
        families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families))

    served(scenario, monkeypatch)


HUGE = "9" * 400


@pytest.mark.parametrize(
    "limit", [f'{{"memory_mb": {HUGE}}}', f'{{"wall_s": {HUGE}}}', '{"wall_s": NaN}']
)
def test_numbers_beyond_all_measure_are_refused(monkeypatch, limit):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        answer = await client.post("/v1/sandboxes", content=f'{{"limits": {limit}}}')
        assert answer.status_code == 400 and len(answer.text) < 400

    served(scenario, monkeypatch)


def test_code_that_is_no_text_is_refused(monkeypatch):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        created = await open_box(client)
        url = f"/v1/sandboxes/{created['id']}/run_code"
        answer = await client.post(url, content=wire.pack({}, b"\xff\xfe"))
        assert answer.status_code == 400 and "UTF-8" in answer.text

    served(scenario, monkeypatch)


@pytest.mark.parametrize("worker", ["9" * 5000, "-1", "", "1.0"])
def test_an_id_of_no_worker_is_unknown(monkeypatch, worker):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        box_id = f"{service.node}-{worker}-x"
        answer = await client.post(f"/v1/sandboxes/{box_id}/run_code", content=frame("1"))
        assert answer.status_code == 404
        assert (await client.delete(f"/v1/sandboxes/{box_id}")).status_code == 204
        body = json.dumps({"ids": [box_id, f"{service.node}-0-\ud800"]})  # half a surrogate
        answer = await client.post("/v1/keepalive", content=body)
        assert len(answer.json()["lost"]) == 2

    served(scenario, monkeypatch)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_nothing_but_health_is_open_to_callers_without_the_token(monkeypatch, path):
    async def scenario(client: httpx.AsyncClient, service: SandboxService) -> None:
        assert (await client.get(path)).status_code == 404

    served(scenario, monkeypatch, token=None)


@pytest.mark.parametrize("token", [TOKEN + "\n", TOKEN + " x", "é" * 20])
def test_a_token_that_no_header_can_carry_is_refused_at_the_start(monkeypatch, token):
    monkeypatch.setenv("SERVING_TOKEN", token)
    with pytest.raises(ConfigError, match="no header can carry"):
        ServingSettings(token_env="SERVING_TOKEN").token()


@pytest.mark.parametrize("value", [None, ""])
def test_a_token_that_was_named_has_to_be_there(monkeypatch, value):
    monkeypatch.delenv("SERVING_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVING_TOKEN", value)
    with pytest.raises(ConfigError, match="SERVING_TOKEN is not set"):
        ServingSettings(token_env="SERVING_TOKEN").token()


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": float("inf")},
        {"ttl_s": float("nan")},
        {"workers": 0},
        {"advertise_url": "http://"},
    ],
)
def test_settings_that_cannot_be_served_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServingSettings(**wrong)
