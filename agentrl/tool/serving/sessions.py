"""Sessions of a tool server: the tools of one trajectory, opened for it and closed after it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import AgentRLError
from agentrl.sandbox.base import SandboxProvider
from agentrl.seeding import derive_seed
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.executor import ToolExecutor
from agentrl.tool.serving.config import ServerLimits
from agentrl.tool.serving.metrics import ServerMetrics
from agentrl.tool.workspace import Workspace
from agentrl.types import ToolCall, ToolResult

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN = 64
"""Characters of an answer that are sent per token of ``max_output_tokens``; the caller, who has a
tokenizer, cuts again."""
_ID_BYTES = 32
_QUEUE_S = 1.5
"""Past the limit of a call until it is refused, if it still waits: a client waits longer."""


class SessionRefused(AgentRLError):
    """A session that cannot be opened or used; ``reason`` is what metrics call it."""

    reason = "refused"


class NotYourSession(SessionRefused):
    """No session of this caller has that id. Whether it is another's is not told."""

    reason = "unknown_session"


class TooManySessions(SessionRefused):
    """As many are open as may be."""

    reason = "max_sessions"


class TooBusy(SessionRefused):
    """A call that could not be made before its deadline."""

    reason = "busy"


class ToolNotOpened(SessionRefused):
    """A tool that cannot be opened."""

    reason = "open_failed"


@dataclass(slots=True, kw_only=True)
class Session:
    """The tools of one trajectory."""

    id: str
    owner: str
    seed: int
    state: Mapping[str, Any]
    """What every tool is opened with, and, under ``files``, what lies in the workspace."""
    executor: ToolExecutor = field(init=False)
    workspace: Workspace = field(init=False)
    num_running: int = 0
    used_at_s: float = 0.0
    is_closed: bool = False


class SessionStore:
    """Opens, finds and closes sessions. Used from one event loop.

    Args:
        toolbox: the tools that are served.
        sandboxes: where they get sandboxes from.
        limits: of the server.
        metrics: what is counted.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        sandboxes: SandboxProvider,
        limits: ServerLimits,
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._toolbox = toolbox
        self._sandboxes = sandboxes
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._is_closing = False

    def __len__(self) -> int:
        """How many are open."""
        return len(self._sessions)

    def open(
        self,
        owner: str,
        *,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Open a session; its tools open with their first call.

        Args:
            owner: who alone may use it.
            session_id: unguessable; None makes one.

        Raises:
            TooManySessions: there are as many as there may be, or the server is stopping.
        """
        if self._is_closing or len(self._sessions) >= self._limits.max_sessions:
            raise TooManySessions(
                "the server is stopping"
                if self._is_closing
                else f"{len(self._sessions)} sessions are open, which is the limit; close some, or "
                "raise --max-sessions"
            )
        session = Session(
            id=session_id or secrets.token_urlsafe(_ID_BYTES),
            owner=owner,
            seed=seed,
            state=state or {},
            used_at_s=self._clock(),
        )
        session.workspace = Workspace(
            self._sandboxes,
            limits=self._toolbox.workspace_limits,
            load_state=lambda: _ready(session.state),
        )
        session.executor = ToolExecutor(
            self._toolbox,
            make_context=lambda tool: _ready(self._context(session, tool)),
            cut=self._cut,
            cut_note="",  # the caller writes one
            seed=seed,
        )
        self._sessions[session.id] = session
        self._metrics.sessions_opened += 1
        return session

    def find(self, session_id: str, owner: str) -> Session:
        """Return a session of ``owner``.

        Raises:
            NotYourSession: there is none, or it is somebody else's; counted apart.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.owner == owner:
            return session
        error = NotYourSession(
            "no session of yours has this id: it was closed, was idle for "
            f"{self._limits.session_ttl_s:g} s, or the server was started anew"
        )
        if session is not None:
            error.reason = "foreign_session"
            logger.warning("a caller used the id of another caller's session")
        raise error

    async def open_tool(self, session: Session, name: str) -> None:
        """Open a tool of a session ahead of its first call.

        Raises:
            ToolNotOpened: it cannot be opened, or there is none of that name.
        """
        with self._running(session):
            known = name in self._toolbox.bindings
            problem = await session.executor.open(name) if known else "there is no such tool"
        if problem is not None:
            raise ToolNotOpened(f"opening {name[:64]!r} failed: {problem}")

    async def call(
        self, session: Session, call: ToolCall, *, timeout_s: float | None = None
    ) -> ToolResult:
        """Run a call in a session.

        Raises:
            TooBusy: its turn did not come in time.
        """
        binding = self._toolbox.bindings.get(call.name)
        limit_s = binding.spec.limits.timeout_s if binding is not None else 1.0
        with self._running(session):
            if binding is not None:  # by a deadline of its own; what fails comes up again
                await session.executor.open(call.name)
            try:
                async with asyncio.timeout(min(timeout_s or limit_s, limit_s) + _QUEUE_S):
                    result = await session.executor.run(call, timeout_s=timeout_s)
            except TimeoutError:
                raise TooBusy(f"too many calls of {call.name} wait; try again later") from None
        self._metrics.add(result)
        return result

    @contextmanager
    def _running(self, session: Session) -> Iterator[None]:
        """Keep a session from being idle."""
        session.num_running += 1
        try:
            yield
        finally:
            session.num_running -= 1
            session.used_at_s = self._clock()

    async def close(self, session: Session, *, reason: str) -> None:
        """Close a session and its tools. Idempotent."""
        self._sessions.pop(session.id, None)
        if session.is_closed:
            return
        session.is_closed = True
        self._metrics.sessions_closed[reason] += 1
        await session.executor.close()
        try:
            await session.workspace.close()
        except Exception as error:
            logger.warning("closing a workspace failed: %s: %s", type(error).__name__, error)

    async def close_all(self) -> None:
        """Open no more, and close all there are."""
        self._is_closing = True
        open_now = list(self._sessions.values())
        await asyncio.gather(*(self.close(session, reason="shutdown") for session in open_now))

    async def close_idle(self) -> None:
        """Close the sessions that nobody has used for ``session_ttl_s``."""
        latest_s = self._clock() - self._limits.session_ttl_s
        idle = [s for s in self._sessions.values() if not s.num_running and s.used_at_s <= latest_s]
        await asyncio.gather(*(self.close(session, reason="idle") for session in idle))

    async def reap_forever(self) -> None:
        """Close idle sessions until cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self._limits.session_ttl_s / 4))
            await self.close_idle()

    # ------------------------------------------------------------------

    def _context(self, session: Session, tool: str) -> ToolContext:
        return ToolContext(
            trajectory_id=session.id,
            seed=derive_seed(session.seed, "tool", tool),
            sandboxes=self._sandboxes,
            state=session.state,
            workspace=session.workspace.open,
        )

    def _cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        """Cut by characters: without a tokenizer, to what any could make ``max_tokens`` of."""
        longest = min(self._limits.max_answer_chars, _CHARS_PER_TOKEN * max_tokens + 1024)
        return text[:longest], max(0, len(text) - longest)


async def _ready(value: Any) -> Any:
    return value
