"""The HTTP application of a tool server.

::

    GET    /v1/tools                  what there is: names, descriptions, parameters, limits
    POST   /v1/sessions               {"seed": 1, "state": {...}}          -> {"session": ID}
    POST   /v1/sessions/ID/tools/NAME open a tool ahead of its first call
    POST   /v1/sessions/ID/calls      {"name": ..., "arguments": {...}, "timeout_s": 5}
    DELETE /v1/sessions/ID
    POST   /v1/tools/NAME             arguments; one call in a session of its own
    POST   /mcp                       the same tools over MCP (streamable HTTP)
    GET    /openapi.json, /docs, /health, /metrics

A session is one trajectory: its tools open with their first call, keep their state, and are closed
with it. Its id is a secret, and of use only with the token that it was opened with.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import SandboxUnavailable, ToolUnavailable
from agentrl.sandbox.base import SandboxProvider
from agentrl.tool.binding import Binding, Toolbox
from agentrl.tool.serving.access import Tokens
from agentrl.tool.serving.config import ServerLimits
from agentrl.tool.serving.gate import OWNER, App, Gate, Receive, Scope, Send
from agentrl.tool.serving.mcp import McpEndpoint
from agentrl.tool.serving.metrics import ServerMetrics
from agentrl.tool.serving.sessions import NotYourSession, Session, SessionRefused, SessionStore
from agentrl.types import ToolCall, ToolResult, ToolStatus

logger = logging.getLogger(__name__)


class OpenRequest(BaseModel):
    """What a session is opened with."""

    model_config = ConfigDict(extra="forbid")

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    state: dict[str, Any] = {}
    """What every tool is opened with, and, under ``files``, what lies in the workspace."""


class OpenReply(BaseModel):
    """A session that is open."""

    session: str


class CallRequest(BaseModel):
    """A call, as a model made it."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] = {}
    timeout_s: Annotated[float | None, Field(gt=0)] = None
    """Where it is nearer than the tool's own limit."""


class CallReply(BaseModel):
    """How a call ended; the statuses are those of :class:`agentrl.types.ToolStatus`."""

    status: ToolStatus
    content: str
    reward: float = 0.0
    cut_chars: int = 0
    """Characters of the answer that are not in ``content``."""
    cut_short: bool = False
    """A limit of the tool's own ended the work before it was done."""
    duration_s: float = 0.0
    retries: int = 0


class ToolServer:
    """The tools of a toolbox as an ASGI application.

    Args:
        toolbox: what is served.
        sandboxes: where the tools get sandboxes from.
        tokens: who may call; without any everybody who can connect.
        limits: of the server.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        sandboxes: SandboxProvider,
        tokens: Tokens | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.toolbox = toolbox
        self.limits = limits or ServerLimits()
        self.metrics = ServerMetrics()
        self.sessions = SessionStore(
            toolbox, sandboxes=sandboxes, limits=self.limits, metrics=self.metrics
        )
        self._mcp = McpEndpoint(toolbox, self.sessions, self.limits)
        api = FastAPI(title="agentrl tools", lifespan=self._lifespan)
        self._add_routes(api)
        self._api = api
        self._gate = Gate(
            self._routed, tokens=tokens or Tokens(), limits=self.limits, metrics=self.metrics
        )

    @property
    def app(self) -> App:
        """The ASGI application."""
        return self._gate

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_mcp = scope["type"] == "http" and scope["path"] in ("/mcp", "/mcp/")
        await (self._mcp if is_mcp else self._api)(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, api: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            reaper = asyncio.create_task(self.sessions.reap_forever())
            stack.push_async_callback(self._end, reaper)
            await stack.enter_async_context(self._mcp.running())
            yield

    async def _end(self, reaper: asyncio.Task[None]) -> None:
        reaper.cancel()
        try:
            async with asyncio.timeout(self.limits.shutdown_timeout_s):
                await self.sessions.close_all()
        except TimeoutError:
            logger.error("%d sessions did not close in time", len(self.sessions))

    # ------------------------------------------------------------------ routes

    def _add_routes(self, api: FastAPI) -> None:
        api.add_api_route("/health", self._health, methods=["GET"])
        api.add_api_route(
            "/metrics", self._metrics_text, methods=["GET"], response_class=PlainTextResponse
        )
        api.add_api_route("/v1/tools", self._list_tools, methods=["GET"])
        api.add_api_route(
            "/v1/sessions",
            self._open,
            methods=["POST"],
            status_code=201,
            openapi_extra=_body_of(OpenRequest.model_json_schema(), required=False),
        )
        api.add_api_route(
            "/v1/sessions/{session_id}/calls",
            self._call,
            methods=["POST"],
            openapi_extra=_body_of(CallRequest.model_json_schema()),
        )
        api.add_api_route(
            "/v1/sessions/{session_id}/tools/{tool}",
            self._open_tool,
            methods=["POST"],
            status_code=204,
        )
        api.add_api_route(
            "/v1/sessions/{session_id}", self._close, methods=["DELETE"], status_code=204
        )
        for binding in self.toolbox.bindings.values():
            self._add_tool(api, binding)
        api.add_exception_handler(SessionRefused, self._on_refused)
        for kind in (SandboxUnavailable, ToolUnavailable):
            api.add_exception_handler(kind, self._on_unavailable)

    def _add_tool(self, api: FastAPI, binding: Binding) -> None:
        """Add the route of one tool, with its own parameters in the OpenAPI document."""
        spec = binding.spec

        async def call_tool(request: Request, owner: Owner) -> CallReply:
            return await self._one_call(spec.name, await _arguments(request), owner)

        api.add_api_route(
            f"/v1/tools/{spec.name}",
            call_tool,
            methods=["POST"],
            operation_id=f"call_{spec.name}",
            summary=spec.description.split("\n")[0],
            description=spec.description,
            openapi_extra=_body_of(dict(spec.parameters)),
        )

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "tools": len(self.toolbox.bindings), "sessions": len(self.sessions)}

    async def _metrics_text(self) -> str:
        return self.metrics.text(
            num_sessions=len(self.sessions), num_requests=self._gate.num_requests
        )

    async def _list_tools(self) -> dict[str, Any]:
        return {"tools": [describe(binding) for binding in self.toolbox.bindings.values()]}

    async def _open(self, body: OpenBody, owner: Owner) -> OpenReply:
        return OpenReply(session=self.sessions.open(owner, seed=body.seed, state=body.state).id)

    async def _call(self, session_id: str, body: CallBody, owner: Owner) -> CallReply:
        session = self.sessions.find(session_id, owner)
        return await self._run(session, body.name, body.arguments, body.timeout_s)

    async def _open_tool(self, session_id: str, tool: str, owner: Owner) -> Response:
        await self.sessions.open_tool(self.sessions.find(session_id, owner), tool)
        return Response(status_code=204)

    async def _close(self, session_id: str, owner: Owner) -> Response:
        await self.sessions.close(self.sessions.find(session_id, owner), reason="client")
        return Response(status_code=204)

    async def _one_call(self, name: str, arguments: dict[str, Any], owner: str) -> CallReply:
        session = self.sessions.open(owner)
        try:
            return await self._run(session, name, arguments, None)
        finally:
            await self.sessions.close(session, reason="one_call")

    async def _run(
        self, session: Session, name: str, arguments: dict[str, Any], timeout_s: float | None
    ) -> CallReply:
        call = ToolCall(name=name, arguments=arguments)
        return _reply(await self.sessions.call(session, call, timeout_s=timeout_s))

    async def _on_refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, SessionRefused)
        self.metrics.refused[error.reason] += 1
        status = 403 if isinstance(error, NotYourSession) else 503
        return JSONResponse({"detail": str(error), "reason": error.reason}, status)

    async def _on_unavailable(self, request: Request, error: Exception) -> Response:
        self.metrics.refused["unavailable"] += 1
        return JSONResponse({"detail": str(error), "reason": "unavailable"}, 503)


def describe(binding: Binding) -> dict[str, Any]:
    """Return what a client needs to know to offer a tool as its own."""
    spec = binding.spec
    limits = spec.limits
    return {
        "name": spec.name,
        "description": spec.description,
        "parameters": dict(spec.parameters),
        "idempotent": spec.idempotent,
        "stateless": binding.is_stateless,
        "limits": {
            "timeout_s": limits.timeout_s,
            "max_calls": limits.max_calls,
            "concurrency": limits.concurrency,
            "max_output_tokens": limits.max_output_tokens,
        },
    }


def _reply(result: ToolResult) -> CallReply:
    return CallReply(
        status=result.status,
        content=result.content.encode("utf-8", "replace").decode(),
        reward=result.reward,
        cut_chars=result.truncated_tokens,  # the store's unit is the character
        cut_short=result.cut_short,
        duration_s=result.duration_s,
        retries=result.retries,
    )


async def _arguments(request: Request) -> dict[str, Any]:
    """Return the JSON object of a body, whatever type the request says it has (curl: a form)."""
    try:
        arguments = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the body is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise HTTPException(422, f"the body must be a JSON object, got {type(arguments).__name__}")
    return arguments


def _body_of(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """Return what OpenAPI says of a body that :func:`_arguments` reads."""
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


M = TypeVar("M", bound=BaseModel)


def _read_as(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    async def read(request: Request) -> M:
        try:
            return model.model_validate(await _arguments(request))
        except ValidationError as error:
            raise HTTPException(422, _explained(error, model)) from error

    return read


def _explained(error: ValidationError, model: type[BaseModel]) -> str:
    parts: list[str] = []
    for found in error.errors():
        where = ".".join(str(part) for part in found["loc"])
        known = {"missing": f"{where!r} is missing", "extra_forbidden": f"unknown key {where!r}"}
        told = f"{where}: {found['msg']}, got {found['input']!r:.80}"
        parts.append(known.get(found["type"], told))
    return f"{'; '.join(parts)}; the body may have: {', '.join(model.model_fields)}"


def _owner(request: Request) -> str:
    return request.scope[OWNER]


OpenBody = Annotated[OpenRequest, Depends(_read_as(OpenRequest))]
CallBody = Annotated[CallRequest, Depends(_read_as(CallRequest))]


Owner = Annotated[str, Depends(_owner)]
