"""The containers of one backend: how each is opened, removed, and looked into when it died."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxLimits, SandboxStatus
from agentrl_sandboxes.docker import container, engine, reaper
from agentrl_sandboxes.docker.channel import AttachedChannel
from agentrl_sandboxes.supervised.bootstrap import first_words
from agentrl_sandboxes.supervised.box import SupervisedSandbox
from agentrl_sandboxes.supervised.inside.contained import EXPIRED

_CALL_S = 10.0
_REMOVE_S = 30.0
_EXIT_S = 3.0
_SIGKILLED = 137


@dataclass(slots=True, kw_only=True, eq=False)
class Container:
    """One container of ours, from before it is created until it is removed."""

    name: str
    limits: SandboxLimits
    ends_at_s: float
    """When its time to live is over, on the event loop's clock."""
    creation: asyncio.Task[None] | None = None
    """Goes on when whoever wanted the box is cancelled: only what exists can be removed."""
    sock: socket.socket | None = None
    box: SupervisedSandbox | None = None
    """Owns the socket from here on."""
    facts: dict[str, Any] = field(default_factory=dict)
    removal: asyncio.Task[None] | None = None
    closing: asyncio.Task[Any] | None = None
    lost: str | None = None
    """Why the engine did not remove it."""


@dataclass(slots=True, kw_only=True)
class Recipe:
    """What all containers of a fleet have in common."""

    image: str
    runtime: str | None
    run_id: str
    ttl_s: float
    create_timeout_s: float


class Fleet:
    """Opens containers on an engine, and keeps each until the engine has removed it."""

    def __init__(self, connection: engine.Engine, recipe: Recipe, max_creating: int) -> None:
        self.engine = connection
        self._recipe = recipe
        self._owner = reaper.this_process()
        self._creating = asyncio.Semaphore(max_creating)
        self._containers: dict[str, Container] = {}
        self.leaked = 0

    async def open(self, limits: SandboxLimits) -> SupervisedSandbox:
        """Create, attach, start, and wait until the supervisor has said hello.

        Raises:
            SandboxError: it was not ready in time, or the engine does not answer or will not.
        """
        async with self._creating:
            clock = asyncio.get_running_loop().time
            started_s = clock()
            entry = Container(
                name=f"agentrl-box-{uuid.uuid4().hex}",
                limits=limits,
                ends_at_s=started_s + self._recipe.ttl_s,
            )
            self._containers[entry.name] = entry
            try:
                entry.creation = asyncio.create_task(
                    self.engine.call(
                        lambda api: self._start_container(api, entry),
                        self._recipe.create_timeout_s,
                    )
                )
                await asyncio.shield(entry.creation)
                assert entry.sock is not None  # the call attached it
                channel = AttachedChannel(entry.sock)
                entry.box = self._make_box(entry, channel)
                with contextlib.suppress(OSError):  # the end of the stream says why
                    await channel.send(first_words(limits, self._recipe.ttl_s))
                left_s = max(0.1, started_s + self._recipe.create_timeout_s - clock())
                try:
                    entry.facts = await entry.box.hello(left_s)
                except SandboxError as error:
                    raise SandboxError(f"{error} ({channel.last_words()})") from None
            except BaseException:
                self._discard(entry)
                raise
            return entry.box

    def entry_of(self, box: SupervisedSandbox) -> Container:
        """The container of a box that is not closed yet."""
        return next(entry for entry in self._containers.values() if entry.box is box)

    def _discard(self, entry: Container) -> None:
        """Begin to close what did not become a box; `close` waits for it."""
        if entry.box is None:
            self._remove(entry)
        else:
            entry.closing = asyncio.create_task(_close_quietly(entry.box))

    async def reap(self) -> int:
        """Remove every container on this engine that nobody owns; return how many.

        Raises:
            SandboxError: the engine does not answer.
        """
        orphans = await self.engine.call(lambda api: reaper.find_orphans(api, self._owner), _CALL_S)
        results = await asyncio.gather(
            *(
                self.engine.call(lambda api, name=name: reaper.remove(api, name), _REMOVE_S)
                for name in orphans
            ),
            return_exceptions=True,
        )
        return sum(result is None for result in results)

    async def close(self) -> None:
        """Remove every container that is left, and wait until that is done."""
        await asyncio.gather(
            *(
                entry.box.close() if entry.box is not None else self._remove(entry)
                for entry in list(self._containers.values())
            ),
            return_exceptions=True,
        )

    def _start_container(self, api: Any, entry: Container) -> None:
        """In a thread: the three calls that make a running container with a socket to it.

        If this took longer than its deadline, the removal came too early, and it is made up for.
        """
        recipe = self._recipe
        container.create(
            api,
            name=entry.name,
            image=recipe.image,
            runtime=recipe.runtime,
            labels=reaper.labels(self._owner, recipe.run_id, recipe.ttl_s),
            limits=entry.limits,
        )
        entry.sock = engine.attach(api, entry.name)
        if entry.removal is None:
            api.start(entry.name)
        if entry.removal is not None:
            entry.sock.close()
            reaper.remove(api, entry.name)

    def _make_box(self, entry: Container, channel: AttachedChannel) -> SupervisedSandbox:
        def kill() -> None:
            channel.hang_up()  # works without the engine, which may be what was lost
            self._remove(entry)

        async def release() -> None:
            await asyncio.shield(self._remove(entry))
            self._containers.pop(entry.name, None)
            if entry.lost is not None:
                raise SandboxError(f"a sandbox's container could not be removed: {entry.lost}")

        return SupervisedSandbox(
            channel,
            entry.limits,
            kill=kill,
            release=release,
            has_witness=False,
            autopsy=lambda: self._autopsy(entry),
        )

    def _remove(self, entry: Container) -> asyncio.Task[None]:
        """Kill and remove a container, once; the task never fails."""
        if entry.removal is None:
            entry.removal = asyncio.create_task(self._finish(entry))
        return entry.removal

    async def _finish(self, entry: Container) -> None:
        if entry.creation is not None:
            await asyncio.gather(entry.creation, return_exceptions=True)
        try:
            await self.engine.call(lambda api: reaper.remove(api, entry.name), _REMOVE_S)
        except SandboxError as error:
            entry.lost = str(error)  # it ends with its channel; the next start removes the rest
            self.leaked += 1
        if entry.box is None:
            self._containers.pop(entry.name, None)
            if entry.sock is not None:
                entry.sock.close()

    async def _autopsy(self, entry: Container) -> tuple[SandboxStatus, str]:
        """Why a box's channel ended: by what ran in it, or for a reason of ours."""
        try:
            state = await self._final_state(entry)
            killed = await self.engine.call(
                lambda api: reaper.was_killed_through(api, entry.name, state["StartedAt"]), _CALL_S
            )
        except engine.NotThere:
            raise SandboxError("the sandbox's container was removed by somebody else") from None
        except engine.EngineLost as error:
            raise SandboxError(f"the sandbox was lost: {error}") from None
        code = state["ExitCode"]
        if state["Running"]:
            raise SandboxError("the connection to a sandbox broke, while its container runs")
        if state["OOMKilled"] and code == _SIGKILLED:
            return SandboxStatus.OOM, f"Memory limit of {entry.limits.memory_mb} MB exceeded."
        if code == EXPIRED:
            raise SandboxError(
                f"the sandbox outlived its {self._recipe.ttl_s:g} s; raise sandbox.kwargs.ttl_s"
            )
        if killed:
            raise SandboxError("the sandbox's container was killed by somebody else")
        return SandboxStatus.SANDBOX_DEAD, f"The sandbox died during this call (exit code {code})."

    async def _final_state(self, entry: Container) -> dict[str, Any]:
        """The container's state once it has ended; its streams end a moment before."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _EXIT_S
        while True:
            seen = await self.engine.call(lambda api: api.inspect_container(entry.name), _CALL_S)
            if not seen["State"]["Running"] or loop.time() > end_s:
                return seen["State"]
            await asyncio.sleep(0.02)


async def _close_quietly(box: SupervisedSandbox) -> None:
    with contextlib.suppress(SandboxError):  # counted as leaked
        await box.close()
