"""The Docker backend: one hardened container per box, some of them started ahead of need."""

from __future__ import annotations

import asyncio
import uuid

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.sandbox.base import SandboxLimits, SandboxReport
from agentrl_sandboxes.docker import container, engine
from agentrl_sandboxes.docker.fleet import Fleet, Recipe
from agentrl_sandboxes.docker.image import BUILD_HINT, DEFAULT_IMAGE, build_local_image
from agentrl_sandboxes.docker.report import describe
from agentrl_sandboxes.supervised.box import SupervisedSandbox
from agentrl_sandboxes.supervised.idle import IdleBoxes
from agentrl_sandboxes.supervised.limits import check_counts, check_limits, check_seconds

_CALL_S = 10.0


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
        run_id: label of all containers, to find those of one run; a random one if empty.
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
        check_seconds(create_timeout_s=create_timeout_s, ttl_s=ttl_s)
        check_counts(0, idle_boxes=idle_boxes)
        check_counts(1, max_creating=max_creating)
        self._base_url = base_url
        self._recipe = Recipe(
            image=image,
            runtime=runtime,
            run_id=run_id or uuid.uuid4().hex[:12],
            ttl_s=ttl_s,
            create_timeout_s=create_timeout_s,
        )
        self._max_creating = max_creating
        self._idle_target = idle_boxes
        self._idle: IdleBoxes | None = None
        self._starting = asyncio.Lock()
        self._fleet: Fleet | None = None
        self._report: SandboxReport | None = None
        self._closed = False
        self.reaped = 0
        """Orphans of dead owners that the start has removed."""

    @property
    def leaked(self) -> int:
        """Containers that the engine did not remove.

        They end with their channel, and the next start of any owner removes what is left of them.
        """
        return self._fleet.leaked if self._fleet else 0

    async def start(self) -> None:
        """Connect, remove orphans, and read back from a first box what holds in there. Once."""
        async with self._starting:
            if self._fleet is None:
                await self._start()

    async def create(self, limits: SandboxLimits) -> SupervisedSandbox:
        """Return a fresh box, a container of its own."""
        check_limits(limits)
        if self._closed or self._fleet is None or self._idle is None:
            raise SandboxError("the sandbox backend is not started, or closed")
        return self._idle.take(limits) or await self._fleet.open(limits)

    async def close(self) -> None:
        """Remove every container of this backend, then disconnect."""
        self._closed = True
        if self._idle is not None:
            await self._idle.close()
        if self._fleet is not None:
            await self._fleet.close()
            self._fleet.engine.close()

    async def reap(self) -> int:
        """Remove every container on this engine whose owner is dead or whose time is over.

        Needs no start, and no image.

        Raises:
            SandboxError: the engine does not answer.
        """
        if self._fleet is not None:
            return await self._fleet.reap()
        fleet = await self._connect()
        try:
            return await fleet.reap()
        finally:
            fleet.engine.close()

    @staticmethod
    def build_image(*, base_url: str | None = None, python: str = "/usr/bin/python3") -> str:
        """Make an image of this machine's Python, where the engine lacks it; return its name.

        Raises:
            SandboxUnavailable: no engine answers, or something to put into the image is missing.
        """
        return build_local_image(base_url=base_url, python=python)

    def report(self) -> SandboxReport:
        """What the engine says of the first container, and what that read back about itself."""
        if self._report is None:
            raise SandboxError("the report is read back from a box: start the backend first")
        return self._report

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        fleet = await self._connect()
        try:
            self.reaped = await fleet.reap()
            await self._check_image(fleet.engine)
            box = await fleet.open(SandboxLimits())
            first = fleet.entry_of(box)
            seen = await fleet.engine.call(lambda api: api.inspect_container(first.name), _CALL_S)
            self._report = describe(seen, first.facts, container.max_tasks(first.limits))
            await box.close()
        except BaseException as error:
            await fleet.close()
            fleet.engine.close()
            if isinstance(error, SandboxError) and not isinstance(error, SandboxUnavailable):
                raise SandboxUnavailable(f"the docker sandbox cannot work here: {error}") from None
            raise
        self._fleet = fleet
        self._idle = IdleBoxes(
            fleet.open,
            self._idle_target,
            is_fresh=lambda box: (
                fleet.entry_of(box).ends_at_s > loop.time() + self._recipe.ttl_s / 2
            ),
            at_once=self._max_creating,
        )

    async def _connect(self) -> Fleet:
        loop = asyncio.get_running_loop()
        client = await loop.run_in_executor(None, engine.connect, self._base_url)
        return Fleet(engine.Engine(client), self._recipe, self._max_creating)

    async def _check_image(self, connection: engine.Engine) -> None:
        image = self._recipe.image
        try:
            await connection.call(lambda api: api.inspect_image(image), _CALL_S)
        except engine.NotThere:
            raise SandboxUnavailable(f"the engine has no image {image!r}. {BUILD_HINT}") from None
