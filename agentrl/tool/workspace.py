"""The one sandbox that the tools of a trajectory share, so that all see the same files.

A tool that works in it declares what it needs of it as an attribute of its instances::

    class Compile:
        def __init__(self) -> None:
            self.workspace_limits = SandboxLimits(memory_mb=512)

        async def open(self, context: ToolContext) -> None:
            self._sandbox = await context.workspace()  # never closed by the tool

The sandbox gets the largest of each limit over all tools of the environment, whichever of them
is called first: what a model may use does not depend on the order of its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from agentrl.errors import EnvError, SandboxError, ToolError
from agentrl.sandbox.base import Sandbox, SandboxLimits, SandboxProvider
from agentrl.sandbox.grading import collect

WORKSPACE = "workspace"
"""Under this name ``Env.tool_state`` is asked for ``{"files": {path: text}}``."""


def widest(asked: Iterable[SandboxLimits]) -> SandboxLimits:
    """Return the largest of each limit; the defaults where nothing is asked."""
    every = list(asked)
    if not every:
        return SandboxLimits()
    names = [field.name for field in fields(SandboxLimits)]
    return SandboxLimits(**{name: max(getattr(one, name) for one in every) for name in names})


class Workspace:
    """Opened at first use, closed by whoever made it, after the tools.

    Args:
        sandboxes: where the sandbox comes from.
        limits: of the sandbox; see :func:`widest`.
        load_state: returns what the environment puts into it, asked once it is open.
    """

    def __init__(
        self,
        sandboxes: SandboxProvider,
        *,
        limits: SandboxLimits,
        load_state: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ) -> None:
        self._sandboxes = sandboxes
        self._limits = limits
        self._load_state = load_state
        self._opening = asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self._filled = False
        self._closed = False

    async def open(self) -> Sandbox:
        """Return the sandbox, the same at every call; the first call opens it.

        Raises:
            SandboxError: none could be had, or the workspace is closed.
            EnvError: a file of the environment cannot be written.
        """
        async with self._opening:
            if self._closed:
                raise SandboxError("the workspace is closed")
            if self._sandbox is None:
                self._sandbox = await self._sandboxes.acquire(self._limits)
            if not self._filled:
                await self._fill(self._sandbox)
                self._filled = True
            return self._sandbox

    async def close(self) -> None:
        """Close the sandbox, if there is one. Idempotent."""
        self._closed = True
        async with self._opening:
            sandbox = self._sandbox
        if sandbox is not None:
            await sandbox.close()
            self._sandbox = None  # only now: where this is cancelled, the next call waits for it

    async def take(self, patterns: Sequence[str]) -> dict[str, bytes]:
        """Return the files that match, and end the sandbox with all that runs in it.

        So nothing of the agent's is alive when its work is graded. Empty where no tool ever opened
        the workspace. See :func:`agentrl.sandbox.grading.collect`.

        Raises:
            SandboxError: the sandbox failed on our side.
        """
        try:
            return {} if self._sandbox is None else await collect(self._sandbox, patterns)
        finally:
            await self.close()

    async def _fill(self, sandbox: Sandbox) -> None:
        if self._load_state is None:
            return
        files = (await self._load_state()).get("files", {})
        if not isinstance(files, Mapping):
            raise EnvError(
                f"tool_state({WORKSPACE!r})['files'] must be a mapping of paths to text, got "
                f"{type(files).__name__}"
            )
        for path, content in files.items():
            if not isinstance(path, str) or not isinstance(content, str | bytes):
                raise EnvError(
                    f"tool_state({WORKSPACE!r})['files'] must map paths to text or bytes, got "
                    f"{path!r:.80}: {type(content).__name__}"
                )
            data = content.encode() if isinstance(content, str) else content
            try:
                await sandbox.write(path, data)
            except ToolError as error:
                raise EnvError(f"a file of tool_state({WORKSPACE!r}): {error}") from error
