"""What each worker of a sandbox server serves."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.requests import ClientDisconnect

from agentrl.errors import AgentRLError, ConfigError, SandboxError, SandboxUnavailable, ToolError
from agentrl.sandbox.serving import metrics, wire
from agentrl.sandbox.serving.leases import UnknownSandbox
from agentrl.sandbox.serving.peers import PeerLost, Peers
from agentrl.sandbox.serving.service import SandboxService

T = TypeVar("T")

_MAX_JSON_BYTES = 1 << 20
_WORKER = re.compile(r"[0-9]{1,6}")
# The first that fits tells the status of the reply, and the word by which clients know the error.
_REPLIES: list[tuple[type[Exception], int, str]] = [
    (UnknownSandbox, 404, "unknown"),
    (PeerLost, 502, "sandbox"),
    (ToolError, 422, "tool"),
    (ConfigError, 400, "config"),
    (SandboxUnavailable, 503, "unavailable"),
    (SandboxError, 503, "sandbox"),
    (AgentRLError, 500, "sandbox"),
]


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _ClientGone(Exception):
    """Nobody waits for the answer any more."""


def create_app(service: SandboxService, peers: Peers | None = None) -> FastAPI:
    """Return the application of one worker; it starts and closes the service with itself.

    Args:
        service: the boxes of this worker.
        peers: the other workers; None where there are none.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.close()
            if peers is not None:
                await peers.close()

    # No pages that describe it: they would be open to callers without the token.
    app = FastAPI(title="agentrl sandbox server", lifespan=lifespan, openapi_url=None)
    app.include_router(_Endpoints(service, peers).router())

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether this worker answers; needs no token."""
        return {"status": "ok", "backend": service.settings.backend}

    @app.exception_handler(AgentRLError)
    async def tell(_: Request, error: Exception) -> Response:
        status, kind = next((s, k) for t, s, k in _REPLIES if isinstance(error, t))
        return _error(status, kind, str(error))

    @app.exception_handler(_Refused)
    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, _Refused)
        return _error(error.status, "refused", str(error))

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(_ClientGone)
    async def nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    return app


class _Endpoints:
    def __init__(self, service: SandboxService, peers: Peers | None) -> None:
        self._service = service
        self._peers = peers
        self._token = service.settings.token()

    def router(self) -> APIRouter:
        """Return the routes, each of which needs the token."""
        router = APIRouter(dependencies=[Depends(self._authorise)])
        for method, path, endpoint in (
            ("POST", "/v1/sandboxes", self.create),
            ("POST", "/v1/sandboxes/{box_id}/{operation}", self.call),
            ("DELETE", "/v1/sandboxes/{box_id}", self.close),
            ("POST", "/v1/keepalive", self.keep_alive),
            ("GET", "/v1/report", self.report),
            ("GET", "/v1/counts", self.counts),
            ("GET", "/metrics", self.metrics),
        ):
            router.add_api_route(path, endpoint, methods=[method], response_class=Response)
        return router

    async def create(self, request: Request) -> Response:
        """Open a box: {limits} -> {id, url, ttl_s, limits, lowered, max_timeout_s}."""
        body = await self._body(request, _MAX_JSON_BYTES)
        if self._peers is not None and wire.FORWARDED not in request.headers:
            worker = self._peers.next()
            if worker != self._peers.own:
                return await self._forward(request, worker, body)
        reply = await self._create_for(request, _json_object(body))
        return _json(reply, 201)

    async def call(self, request: Request, box_id: str, operation: str) -> Response:
        """One operation on a box: a frame for a frame."""
        if operation not in wire.OPERATIONS:
            raise _Refused(404, f"no operation {operation!r}; there are {wire.OPERATIONS}")
        worker = self._worker_of(box_id)
        body = await self._body(request, self._service.settings.max_body_mb << 20)
        if worker != self._service.worker:
            return await self._forward(request, worker, body)
        try:
            header, payload = wire.unpack(body)
        except wire.WireError as error:
            raise ConfigError(f"the request is no frame: {error}") from None
        call = self._service.call(box_id, operation, header, payload)
        return Response(await _while_wanted(request, call), media_type=wire.MEDIA_TYPE)

    async def close(self, request: Request, box_id: str) -> Response:
        """Close a box. Closing what is closed already is no error."""
        try:
            worker = self._worker_of(box_id)
        except UnknownSandbox:
            return Response(status_code=204)
        if worker != self._service.worker:
            try:
                return await self._forward(request, worker, b"")
            except PeerLost:  # and its boxes with it
                return Response(status_code=204)
        # Goes on where the client does not wait for it.
        await asyncio.shield(asyncio.ensure_future(self._service.close_box(box_id)))
        return Response(status_code=204)

    async def keep_alive(self, request: Request) -> Response:
        """Renew leases: {ids} -> {lost: the ids that are unknown}."""
        body = await self._body(request, _MAX_JSON_BYTES)
        ids = _json_object(body).get("ids")
        if not isinstance(ids, list) or not all(isinstance(box_id, str) for box_id in ids):
            raise ConfigError("keep-alive needs ids, a list of strings")
        lost: list[str] = []
        by_worker: dict[int, list[str]] = {}
        for box_id in ids:
            try:
                by_worker.setdefault(self._worker_of(box_id), []).append(box_id)
            except UnknownSandbox:
                lost.append(box_id)
        for worker, own in by_worker.items():
            if worker == self._service.worker:
                lost += self._service.leases.renew(own)
                continue
            try:
                answer = await self._forward(request, worker, json.dumps({"ids": own}).encode())
                lost += json.loads(bytes(answer.body))["lost"]
            except PeerLost:
                lost += own
        return _json({"lost": lost})

    async def report(self) -> Response:
        """How the backend enforces each limit, and what this server allows."""
        return _json(self._service.report())

    async def counts(self) -> Response:
        """What this worker alone has counted; the workers ask each other."""
        return _json(self._service.snapshot())

    async def metrics(self, request: Request) -> Response:
        """What all workers have counted, for Prometheus."""
        snapshots: dict[int, dict[str, Any] | None] = {
            self._service.worker: self._service.snapshot()
        }
        if self._peers is not None:
            snapshots |= await self._peers.counts(request.headers)
        return PlainTextResponse(metrics.render(snapshots), media_type="text/plain; version=0.0.4")

    async def _authorise(self, request: Request) -> None:
        if self._token is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.encode(), self._token.encode())
        if kind.lower() != "bearer" or not right:
            raise _Refused(401, "the bearer token is missing or wrong")

    def _worker_of(self, box_id: str) -> int:
        parts = box_id.split("-", 2)
        if len(parts) != 3 or parts[0] != self._service.node or not _WORKER.fullmatch(parts[1]):
            raise UnknownSandbox(
                "this server never gave out that sandbox: it was restarted, or the request went "
                "to another node (start each node behind a load balancer with --advertise-url)"
            )
        workers = self._peers.workers if self._peers is not None else 1
        worker = int(parts[1])
        if worker >= workers:
            raise UnknownSandbox("the server knows no such sandbox")
        return worker

    async def _body(self, request: Request, most_bytes: int) -> bytes:
        declared = request.headers.get("content-length", "0")
        data = bytearray()
        too_long = declared.isdecimal() and int(declared) > most_bytes
        try:
            async with asyncio.timeout(self._service.settings.body_timeout_s):
                if not too_long:
                    async for chunk in request.stream():
                        data += chunk
                        if len(data) > most_bytes:
                            too_long = True
                            break
        except TimeoutError:
            raise _Refused(408, "the body of the request did not arrive in time") from None
        if too_long:
            raise _Refused(413, f"the request is longer than {most_bytes >> 20} MiB")
        return bytes(data)

    async def _create_for(self, request: Request, asked: dict[str, Any]) -> dict[str, Any]:
        """Create a box; one whose client went away meanwhile is closed at once."""
        creating = asyncio.ensure_future(self._service.create(asked))
        try:
            return await _while_wanted(request, asyncio.shield(creating))
        except (_ClientGone, asyncio.CancelledError):
            creating.add_done_callback(self._discard)
            raise

    def _discard(self, creating: asyncio.Future[dict[str, Any]]) -> None:
        if not creating.cancelled() and creating.exception() is None:
            closing = asyncio.ensure_future(self._service.close_box(creating.result()["id"]))
            _background.add(closing)
            closing.add_done_callback(_background.discard)

    async def _forward(self, request: Request, worker: int, body: bytes) -> Response:
        assert self._peers is not None  # no id names another worker otherwise
        path = request.url.path
        work = self._peers.forward(worker, request.method, path, request.headers, body)
        answer = await _while_wanted(request, work)
        kind = answer.headers.get("content-type")
        return Response(answer.content, status_code=answer.status_code, media_type=kind)


_background: set[asyncio.Future[Any]] = set()


async def _while_wanted(request: Request, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Await some work; cancel it if the client closes its connection meanwhile.

    A cancelled call ends its box, so that nothing runs on for nobody.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientGone
        return task.result()
    finally:
        for waiting in (task, gone):
            waiting.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the request is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("the request must be a JSON object")
    return value


def _error(status: int, kind: str, message: str) -> Response:
    return _json({"error": {"type": kind, "message": message}}, status)


def _json(value: Any, status: int = 200) -> Response:
    """Return JSON in ASCII: it can hold every text, half surrogates included."""
    return Response(json.dumps(value), status_code=status, media_type="application/json")
