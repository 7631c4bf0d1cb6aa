"""A session with an MCP server, by the official SDK: a child process, or a server over HTTP.

Everything here runs on the background loop. The SDK wants a session to be entered and left by one
task; :class:`McpSession` is that task, and others call through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import InfrastructureError, ToolError
from agentrl.references import cleared
from agentrl.tool.secrets import resolved, resolved_headers

if TYPE_CHECKING:
    import httpx2
    import mcp

_KEEPER = Path(__file__).with_name("mcp_keeper.py")
_CLOSE_S = 8.0
"""The SDK gives a server 2 s to leave by itself, 2 more after SIGTERM."""
_MAX_STDERR_CHARS = 2000
_CONNECTION_CLOSED = -32000
_MAX_PAGES = 50
_TALKATIVE = (
    "mcp.client.stdio",
    "mcp.client.streamable_http",
    "mcp.client.session",
    "mcp.shared.jsonrpc_dispatcher",
)
"""Loggers of the SDK that write down what a server sent, which may be a secret."""


@dataclass(slots=True, frozen=True, kw_only=True)
class McpServer:
    """Where a server is; two specs that say the same share it."""

    program: str | None = None
    """Absolute path, for a server that is started."""
    arguments: tuple[str, ...] = ()
    folder: Path = Path()
    """Working directory of the program."""
    env: tuple[tuple[str, str], ...] = ()
    """Beyond HOME, PATH and the like; secrets as ``${env:NAME}``."""
    url: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Secrets as ``${env:NAME}``."""
    max_bytes: int = 4_000_000
    """Of one message."""
    start_timeout_s: float = 30.0

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.url or Path(self.program or "").name

    def cleared(self, text: str) -> str:
        """Return a text without the secrets that this server knows."""
        return cleared(text, [value for _, value in (*self.env, *self.headers)])


class McpSession:
    """One session; made by :meth:`connect`."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._ready: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._faults = _Faults()
        self._lost = False
        self._task = asyncio.create_task(self._own())

    @classmethod
    async def connect(cls, server: McpServer) -> McpSession:
        """Open a session.

        Raises:
            InfrastructureError: it did not start or answer in time; with what it wrote on stderr.
        """
        session = cls(server)
        try:
            async with asyncio.timeout(server.start_timeout_s):
                await asyncio.shield(session._ready)
        except BaseException as error:
            await session.close()
            if isinstance(error, TimeoutError):
                problem = f"did not answer within {server.start_timeout_s:g} s"
            elif isinstance(error, Exception):
                problem = f"could not be started: {_innermost(error)}"
            else:
                raise
            raise InfrastructureError(session._told(problem)) from None
        return session

    @property
    def is_lost(self) -> bool:
        """Whether the server is gone."""
        return self._lost or self._task.done()

    async def list_tools(self) -> list[Any]:
        """Return the tools of the server, as the SDK has them.

        Raises:
            InfrastructureError: the server fails.
        """
        client, tools, cursor = self._ready.result(), [], None
        try:
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return tools
        except Exception as error:
            raise InfrastructureError(
                self._told(f"did not list its tools: {_innermost(error)}")
            ) from None
        raise InfrastructureError(self._told(f"lists more than {_MAX_PAGES} pages of tools"))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what a tool answers, as text.

        Raises:
            ToolError: the tool or the server refuses the call.
            InfrastructureError: the server is gone, or broke the protocol.
        """
        from mcp import MCPError

        if self.is_lost:
            raise InfrastructureError(self._told("is gone"))
        num_faults = self._faults.num_seen
        try:
            result = await self._ready.result().call_tool(name, arguments)
        except MCPError as error:
            self._lost = self._lost or error.code == _CONNECTION_CLOSED
            if self._lost:
                why = self._faults.last or error.message
                raise InfrastructureError(self._told(f"was lost: {why}")) from None
            if self._faults.num_seen > num_faults:
                raise InfrastructureError(self._told(f"failed: {self._faults.last}")) from None
            raise ToolError(self._server.cleared(error.message)) from None
        except Exception as error:
            raise InfrastructureError(self._told(f"failed: {_innermost(error)}")) from None
        text = self._server.cleared(text_of(result))
        if result.is_error:
            raise ToolError(text or "the tool failed, and says no more")
        return text

    async def close(self) -> None:
        """End the session, and the server with it if it was started for it. Never raises."""
        self._leave.set()
        if not self._ready.done():
            self._task.cancel()
        try:
            await asyncio.wait((self._task,), timeout=_CLOSE_S)
        finally:  # also at a deadline of the caller's, which may be nearer
            self._task.cancel()

    async def _own(self) -> None:
        import mcp

        for name in _TALKATIVE:
            logging.getLogger(name).addFilter(_without_content)
        try:
            async with self._transport() as transport, mcp.Client(transport, cache=None) as client:
                self._ready.set_result(client)
                await self._leave.wait()
        except BaseException as error:
            self._lost = True
            if not self._ready.done():
                self._ready.set_exception(
                    error if isinstance(error, Exception) else InfrastructureError("was cancelled")
                )
                self._ready.exception()  # retrieved, so that nobody warns of it
            elif not isinstance(error, Exception):
                raise

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        server = self._server
        if server.url is not None:
            async with self._http_client() as client:
                from mcp.client.streamable_http import streamable_http_client

                yield streamable_http_client(
                    server.url, http_client=client, max_sse_event_size=server.max_bytes
                )
            return
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        assert server.program is not None
        keeper = ["-I", "-S", str(_KEEPER), str(os.getpid()), str(server.max_bytes)]
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[*keeper, server.program, *server.arguments],
            env=resolved(dict(server.env)),
            cwd=server.folder,
        )
        with _stderr_of(self._faults) as stderr:
            yield stdio_client(parameters, errlog=stderr)

    def _http_client(self) -> httpx2.AsyncClient:
        import httpx2

        from agentrl.tool.runners.mcp_transport import WatchedTransport

        return httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity", **resolved_headers(dict(self._server.headers))},
            transport=WatchedTransport(self._faults.see, max_bytes=self._server.max_bytes),
            timeout=None,
        )

    def _told(self, problem: str) -> str:
        # Cut once more after it is cleared: the first cut may have left the end of a secret.
        said = self._server.cleared(self._faults.stderr.decode("utf-8", "replace"))
        said = said[-_MAX_STDERR_CHARS:].strip()
        text = self._server.cleared(f"the MCP server {self._server.label} {problem}")
        return f"{text}; it wrote: {said}" if said else text


def _without_content(record: logging.LogRecord) -> bool:
    """Keep what the SDK says, without the error that quotes what a server sent."""
    record.exc_info = record.exc_text = None
    record.msg, record.args = str(record.msg), ()
    return True


class _Faults:
    """What went wrong below the protocol."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.last = ""
        self.stderr = b""

    def see(self, fault: str) -> None:
        self.num_seen += 1
        self.last = fault


@contextlib.contextmanager
def _stderr_of(faults: _Faults) -> Any:
    """Keep the last of what a server writes to its standard error, and none of it in a log."""
    loop = asyncio.get_running_loop()
    source, sink = os.pipe()
    os.set_blocking(source, False)

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(source, 65536)
            faults.stderr = (faults.stderr + data)[-2 * _MAX_STDERR_CHARS :]
            if not data:
                loop.remove_reader(source)

    loop.add_reader(source, read)
    try:
        with os.fdopen(sink, "w") as stream:
            yield stream
    finally:
        read()
        loop.remove_reader(source)
        os.close(source)


def text_of(result: Any) -> str:
    """Return the content of an answer as text; what is none is named with its size."""
    parts = [_part(part) for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _part(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource":
        inner = part.resource
        if hasattr(inner, "text"):
            return inner.text
        return f"[{inner.uri}: {len(inner.blob)} characters of base64]"
    if part.type == "resource_link":
        return f"[{part.uri}]"
    return f"[{part.type}: {part.mime_type}, {len(part.data)} characters of base64]"


def _innermost(error: BaseException) -> str:
    """Return what a group of errors is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
