"""The Docker backend: one hardened container per box, some of them started ahead of need."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ConfigError, SandboxError, SandboxUnavailable
from agentrl.sandbox.base import SandboxLimits, SandboxReport, SandboxStatus
from agentrl_sandboxes.docker import container, engine, reaper
from agentrl_sandboxes.docker.channel import AttachedChannel
from agentrl_sandboxes.docker.image import BUILD_HINT, DEFAULT_IMAGE
from agentrl_sandboxes.docker.report import describe
from agentrl_sandboxes.supervised.box import SupervisedSandbox
from agentrl_sandboxes.supervised.inside.contained import EXPIRED
from agentrl_sandboxes.supervised.limits import check_limits

_CALL_S = 10.0
_REMOVE_S = 30.0
_EXIT_S = 3.0
_SIGKILLED = 137


@dataclass(slots=True, kw_only=True)
class _Container:
    """One container of ours, from before it is created until it is removed."""

    name: str
    limits: SandboxLimits
    ends_at_s: float
    """When its time to live is over, on the event loop's clock."""
    sock: socket.socket | None = None
    box: SupervisedSandbox | None = None
    """Owns the socket from here on."""
    facts: dict[str, Any] = field(default_factory=dict)
    removal: asyncio.Task[None] | None = None


class DockerBackend:
    """Sandboxes in containers of a Docker engine.

    Args:
        base_url: address of the engine (`unix://` or `tcp://`); DOCKER_HOST if None.
        image: any image with Python 3.9 or later as `python3`.
        runtime: an OCI runtime that the engine knows, such as `runsc`; its own default if None.
        idle_boxes: containers kept started in advance; each is used once, like any other.
        max_creating: containers that are being created at once.
        create_timeout_s: seconds until a box that is not ready is given up.
        ttl_s: seconds after which a container ends by itself, whoever still holds it.
        run_id: label of all containers, to find those of one run.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        image: str = DEFAULT_IMAGE,
        runtime: str | None = None,
        idle_boxes: int = 4,
        max_creating: int = 4,
        create_timeout_s: float = 30.0,
        ttl_s: float = 3600.0,
        run_id: str = "",
    ) -> None:
        for name, value in (("create_timeout_s", create_timeout_s), ("ttl_s", ttl_s)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")
        if idle_boxes < 0 or max_creating < 1:
            raise ConfigError(
                "idle_boxes must be at least 0 and max_creating at least 1, got "
                f"{idle_boxes!r} and {max_creating!r}"
            )
        self._base_url = base_url
        self._image = image
        self._runtime = runtime
        self._idle_target = idle_boxes
        self._create_timeout_s = create_timeout_s
        self._ttl_s = ttl_s
        self._owner = reaper.this_process()
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._creating = asyncio.Semaphore(max_creating)
        self._engine: engine.Engine | None = None
        self._containers: dict[str, _Container] = {}
        self._idle: deque[_Container] = deque()
        self._idle_limits: SandboxLimits | None = None
        self._refill: asyncio.Task[None] | None = None
        self._report: SandboxReport | None = None
        self._closed = False
        self.reaped = 0
        """Orphans of dead owners that this backend has removed."""
        self.leaked = 0
        """Containers that the engine did not remove; they end with their channel, and the next
        start of any owner removes what is left of them."""

    async def start(self) -> None:
        """Connect, remove orphans, and read back from a first box what holds in there."""
        loop = asyncio.get_running_loop()
        client = await loop.run_in_executor(None, engine.connect, self._base_url)
        self._engine = engine.Engine(client)
        try:
            await self.reap()
            await self._check_image()
            first = await self._open(SandboxLimits())
            seen = await self._call(lambda api: api.inspect_container(first.name))
            self._report = describe(seen, first.facts, container.max_tasks(first.limits))
            await self._box_of(first).close()
        except SandboxUnavailable:
            await self.close()
            raise
        except SandboxError as error:
            await self.close()
            raise SandboxUnavailable(f"the docker sandbox cannot work here: {error}") from None

    async def create(self, limits: SandboxLimits) -> SupervisedSandbox:
        """Return a fresh box, a container of its own."""
        check_limits(limits)
        if self._closed or self._engine is None:
            raise SandboxError("the sandbox backend is not started, or closed")
        found = await self._take_idle(limits) or await self._open(limits)
        if self._idle_target and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill_idle())
        return self._box_of(found)

    async def close(self) -> None:
        """Remove every container of this backend, then disconnect."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        held = list(self._containers.values())
        for entry in held:
            self._remove(entry)
        boxes = [entry.box.close() for entry in held if entry.box is not None]
        removals = [entry.removal for entry in held if entry.removal is not None]
        await asyncio.gather(*boxes, *removals, return_exceptions=True)
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    async def reap(self) -> int:
        """Remove every container on this engine whose owner is dead or whose time is over.

        Raises:
            SandboxError: the engine does not answer.
        """
        orphans = await self._call(lambda api: reaper.find_orphans(api, self._owner))
        removals = (
            self._call(lambda api, name=name: reaper.remove(api, name), _REMOVE_S)
            for name in orphans
        )
        results = await asyncio.gather(*removals, return_exceptions=True)
        removed = sum(result is None for result in results)
        self.reaped += removed
        return removed

    def report(self) -> SandboxReport:
        """What the engine says of the first container, and what that read back about itself."""
        if self._report is None:
            raise SandboxError("the report is read back from a box: start the backend first")
        return self._report

    async def _call(self, work: Any, deadline_s: float = _CALL_S) -> Any:
        if self._engine is None:
            raise engine.EngineLost("the connection to the Docker engine is closed")
        return await self._engine.call(work, deadline_s)

    async def _check_image(self) -> None:
        try:
            await self._call(lambda api: api.inspect_image(self._image))
        except engine.NoSuchContainer:
            raise SandboxUnavailable(
                f"the engine has no image {self._image!r}. {BUILD_HINT}"
            ) from None

    def _box_of(self, entry: _Container) -> SupervisedSandbox:
        assert entry.box is not None  # only opened ones are handed around
        return entry.box

    async def _take_idle(self, limits: SandboxLimits) -> _Container | None:
        if self._idle_limits != limits:
            stale, self._idle = self._idle, deque()
            self._idle_limits = limits
            for entry in stale:
                self._remove(entry)
        half_life_s = asyncio.get_running_loop().time() + self._ttl_s / 2
        while self._idle:
            entry = self._idle.popleft()
            if entry.ends_at_s > half_life_s and not self._box_of(entry).ended:
                return entry
            self._remove(entry)
        return None

    async def _fill_idle(self) -> None:
        """Start boxes ahead of need; a failure here shows again where a box is asked for."""
        while not self._closed and (missing := self._idle_target - len(self._idle)) > 0:
            limits = self._idle_limits
            if limits is None:
                return
            opened = await asyncio.gather(
                *(self._open(limits) for _ in range(missing)), return_exceptions=True
            )
            for entry in opened:
                if not isinstance(entry, _Container):
                    continue
                if limits == self._idle_limits and not self._closed:
                    self._idle.append(entry)
                else:
                    self._remove(entry)
            if any(isinstance(entry, BaseException) for entry in opened):
                return

    async def _open(self, limits: SandboxLimits) -> _Container:
        """Create, attach, start, and wait until the supervisor has said hello."""
        async with self._creating:
            clock = asyncio.get_running_loop().time
            started_s = clock()
            entry = _Container(
                name=f"agentrl-box-{uuid.uuid4().hex}",
                limits=limits,
                ends_at_s=started_s + self._ttl_s,
            )
            self._containers[entry.name] = entry
            try:
                await self._call(
                    lambda api: self._start_container(api, entry), self._create_timeout_s
                )
                assert entry.sock is not None  # the call attached it
                channel = AttachedChannel(entry.sock)
                entry.box = self._make_box(entry, channel)
                with contextlib.suppress(OSError):  # the end of the stream says why
                    await channel.send(container.first_words(limits, self._ttl_s))
                left_s = max(0.1, started_s + self._create_timeout_s - clock())
                try:
                    entry.facts = await entry.box.hello(left_s)
                except SandboxError as error:
                    raise SandboxError(f"{error} ({channel.last_words()})") from None
            except BaseException:
                if entry.box is not None:
                    await entry.box.close()
                self._remove(entry)
                raise
            return entry

    def _start_container(self, api: Any, entry: _Container) -> None:
        """In a thread: the three calls that make a running container with a socket to it.

        Whoever waits may have given up meanwhile, and its removal may have come too early.
        """
        container.create(
            api,
            name=entry.name,
            image=self._image,
            runtime=self._runtime,
            labels=reaper.labels(self._owner, self._run_id, self._ttl_s),
            limits=entry.limits,
        )
        entry.sock = engine.attach(api, entry.name)
        if entry.removal is None:
            api.start(entry.name)
        if entry.removal is not None:
            entry.sock.close()
            reaper.remove(api, entry.name)

    def _make_box(self, entry: _Container, channel: AttachedChannel) -> SupervisedSandbox:
        def kill() -> None:
            self._remove(entry)

        async def release() -> None:
            await asyncio.shield(self._remove(entry))

        return SupervisedSandbox(
            channel,
            entry.limits,
            kill=kill,
            release=release,
            has_witness=False,
            autopsy=lambda: self._autopsy(entry),
        )

    def _remove(self, entry: _Container) -> asyncio.Task[None]:
        """Kill and remove a container, once; the task never fails."""
        if entry.removal is None:
            entry.removal = asyncio.create_task(self._finish(entry))
        return entry.removal

    async def _finish(self, entry: _Container) -> None:
        try:
            await self._call(lambda api: reaper.remove(api, entry.name), _REMOVE_S)
        except SandboxError:
            self.leaked += 1
        finally:
            self._containers.pop(entry.name, None)
            if entry.sock is not None and entry.box is None:
                entry.sock.close()

    async def _autopsy(self, entry: _Container) -> tuple[SandboxStatus, str]:
        """Why a box's channel ended: by what ran in it, or for a reason of ours."""
        try:
            state = await self._final_state(entry)
        except engine.NoSuchContainer:
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
                f"the sandbox outlived its {self._ttl_s:g} s; raise sandbox.kwargs.ttl_s"
            )
        if await self._call(
            lambda api: reaper.was_killed_through(api, entry.name, state["StartedAt"])
        ):
            raise SandboxError("the sandbox's container was killed by somebody else")
        return SandboxStatus.SANDBOX_DEAD, f"The sandbox died during this call (exit code {code})."

    async def _final_state(self, entry: _Container) -> dict[str, Any]:
        """The container's state once it has ended; its streams end a moment before."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _EXIT_S
        while True:
            seen = await self._call(lambda api: api.inspect_container(entry.name))
            if not seen["State"]["Running"] or loop.time() > end:
                return seen["State"]
            await asyncio.sleep(0.02)
