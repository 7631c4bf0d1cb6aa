"""The tools of a server over MCP, by the official SDK: streamable HTTP on the same port.

An MCP session is a session of the store, under the SDK's session id: its tools keep their state
until the client ends it, or leaves it idle. Clients of protocol versions without sessions get one
session per call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from agentrl.errors import ConfigError
from agentrl.extras import missing_extra
from agentrl.tool.binding import Toolbox
from agentrl.tool.serving.config import ServerLimits
from agentrl.tool.serving.gate import OWNER, Message, Receive, Scope, Send
from agentrl.tool.serving.sessions import NotYourSession, SessionStore
from agentrl.types import ToolCall, ToolResult, ToolStatus

try:
    import mcp_types
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel.server import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
except ImportError as error:
    raise ConfigError(missing_extra("mcp", "agentrl tools serve")) from error

_SESSION_HEADER = b"mcp-session-id"


class McpEndpoint:
    """An ASGI application that speaks MCP.

    Args:
        toolbox: what is served.
        sessions: where the tools of a session live.
        limits: of the server.
    """

    def __init__(self, toolbox: Toolbox, sessions: SessionStore, limits: ServerLimits) -> None:
        self._sessions = sessions
        self._tools = [
            mcp_types.Tool(
                name=binding.spec.name,
                description=binding.spec.description,
                input_schema=dict(binding.spec.parameters),
            )
            for binding in toolbox.bindings.values()
        ]
        server: Server[Any] = Server(
            "agentrl-tools", on_list_tools=self._list, on_call_tool=self._call
        )
        self._manager = StreamableHTTPSessionManager(
            server,
            session_idle_timeout=limits.session_ttl_s,
            max_request_body_size=limits.max_body_bytes,
            max_sessions=limits.max_sessions,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while open."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its caller is known."""
        owner = scope[OWNER]
        # So the SDK binds its sessions to the token, as the store does.
        user = AuthenticatedUser(AccessToken(token="", client_id=owner, scopes=[]))
        given = _session_id(scope["headers"])

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                made = _session_id(message["headers"])
                if given is None and made is not None:
                    self._sessions.open(owner, session_id=_key(made))
                elif given is not None and scope["method"] == "DELETE":
                    await self._end(given, owner)
            await send(message)

        await self._manager.handle_request({**scope, "user": user}, receive, watched)

    async def _end(self, session_id: str, owner: str) -> None:
        try:
            session = self._sessions.find(_key(session_id), owner)
        except NotYourSession:  # it was idle
            return
        await self._sessions.close(session, reason="client")

    async def _list(
        self, context: ServerRequestContext[Any], params: Any
    ) -> mcp_types.ListToolsResult:
        return mcp_types.ListToolsResult(tools=self._tools)

    async def _call(
        self, context: ServerRequestContext[Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        request: Any = context.request
        owner = request.scope[OWNER]
        call = ToolCall(name=params.name, arguments=dict(params.arguments or {}))
        session_id = request.headers.get(_SESSION_HEADER.decode())
        if session_id is not None:
            session = self._sessions.find(_key(session_id), owner)
            return _result(await self._sessions.call(session, call))
        session = self._sessions.open(owner)
        try:
            return _result(await self._sessions.call(session, call))
        finally:
            await self._sessions.close(session, reason="one_call")


def _session_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    found = dict(headers).get(_SESSION_HEADER)
    return None if found is None else found.decode("latin-1")


def _key(session_id: str) -> str:
    return f"mcp:{session_id}"


def _result(result: ToolResult) -> mcp_types.CallToolResult:
    text = result.content
    if result.truncated_tokens:
        text += f"\n[cut: {result.truncated_tokens} more characters]"
    return mcp_types.CallToolResult(
        content=[mcp_types.TextContent(type="text", text=text)],
        is_error=result.status is not ToolStatus.OK,
    )
