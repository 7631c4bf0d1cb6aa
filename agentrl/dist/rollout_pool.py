"""Rollout workers behind one callable: the least loaded one plays, a lost one is replaced.

A group that was being played where a process died is played again elsewhere. Its seeds derive from
ids, so with the same weights it comes out the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.dist.rollout_handle import RolloutHandle
from agentrl.dist.weight_sync.direct import DirectChannel
from agentrl.dist.weight_sync.shipment import Shipment
from agentrl.errors import EngineError, WorkerLost, WorkerTimeout
from agentrl.rollout.tasks import Dispatch
from agentrl.types import TrajectoryGroup
from agentrl.weights.served import refuse_other_weights

logger = logging.getLogger(__name__)
T = TypeVar("T")

METRICS_TIMEOUT_S = 10.0
"""For a worker to say what its engines have done."""
ANSWER_TIMEOUT_S = 60.0
"""For a worker to say that it is there, where an update has failed, or that it has cut a group."""
DEVICE_TIMEOUT_S = 600.0
"""For all workers to give their devices away, or to take them again."""


@dataclass(slots=True, eq=False)
class _Member:
    """A place in the pool, whichever process fills it."""

    index: int
    handle: RolloutHandle | None = None
    """None while a lost process is being replaced."""
    num_groups: int = 0
    """Being played there."""
    is_behind: bool = False
    """It was replaced, and gets its weights with the next update: until then it plays nothing."""

    @property
    def label(self) -> str:
        return f"rollout worker {self.index}"


class RolloutPool:
    """The rollout workers of a run.

    Args:
        spawn: index of a worker -> a handle to a new process.
        num_workers: of them.
        max_groups: that one worker is given at a time.
        max_restarts: lost processes that are replaced in the whole run; the next one ends it.
        start_timeout_s: for a worker to open.
    """

    def __init__(
        self,
        spawn: Callable[[int], RolloutHandle],
        *,
        num_workers: int,
        max_groups: int,
        max_restarts: int,
        start_timeout_s: float,
    ) -> None:
        self._spawn = spawn
        self._members = [_Member(index) for index in range(num_workers)]
        self._max_groups = max_groups
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._changed = asyncio.Condition()
        self._control = asyncio.Lock()
        """Held while weights are loaded or devices change hands."""
        self._playing: dict[tuple[str, int], tuple[_Member, RolloutHandle]] = {}
        """(purpose, index of the prompt) -> where it is being played."""
        self._replacing: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._shipment: Shipment | None = None
        self._direct: tuple[DirectChannel, int] | None = None
        """What updates workers directly, and the version they were updated to."""
        self._asleep = 0
        """Level, while devices are given away."""
        self._awake = asyncio.Event()
        """Set while they are not: no process is started on one that is in use."""
        self._awake.set()
        self.dtypes: dict[str, str] = {}
        """Name -> dtype of the weights that are served; known once started."""
        self.num_restarts = 0
        """Lost processes that were replaced."""
        self.num_replayed = 0
        """Groups that were played again, since their process was lost."""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open every worker at once.

        Raises:
            AgentRLError: whatever of it cannot be used; the other workers are closed.
        """
        opening = [asyncio.ensure_future(self._open(member)) for member in self._members]
        try:
            opened = await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            ended = await asyncio.gather(*opening, return_exceptions=True)
            await asyncio.gather(
                *(item[0].close() for item in ended if not isinstance(item, BaseException))
            )
            raise
        for member, (handle, _) in zip(self._members, opened, strict=True):
            member.handle = handle
        self.dtypes = opened[0][1]

    async def _open(self, member: _Member) -> tuple[RolloutHandle, dict[str, str]]:
        handle = self._spawn(member.index)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return handle, await handle.start()
        except TimeoutError:
            await handle.close()
            raise WorkerTimeout(
                f"{member.label} did not open within cluster.start_timeout_s="
                f"{self._start_timeout_s} s: the cluster may lack free CPUs or GPUs for it (`ray "
                "status` tells), or its model and environment take longer; free them, or raise it"
            ) from None
        except BaseException:
            await handle.close()
            raise

    async def close(self) -> None:
        """Close every worker and end its process. Idempotent."""
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        handles = [member.handle for member in self._members if member.handle is not None]
        for member in self._members:
            member.handle = None
        await self._fail(EngineError("the rollout workers are closed"))
        await asyncio.gather(*(handle.close() for handle in handles))

    # ------------------------------------------------------------------ groups

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt where the fewest groups are being played.

        Raises:
            WorkerLost: more processes were lost than ``max_restarts``.
            AgentRLError: what must end the run; failures of episodes are data.
        """
        while True:
            member, handle = await self._take()
            self._playing[purpose, dispatch.index] = member, handle
            try:
                return await handle.run_group(purpose, dispatch)
            except WorkerLost as error:
                self.num_replayed += 1
                await self._replace(member, handle, error)
            finally:
                self._playing.pop((purpose, dispatch.index), None)
                await self._give_back(member)

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        """Have the episodes of a prompt end with what they have, where it is being played.

        Raises:
            WorkerLost: see :meth:`run_group`.
        """
        if (found := self._playing.get((purpose, dispatch.index))) is not None:
            member, handle = found
            try:
                with suppress(TimeoutError):  # it hangs, and others wait to be cut
                    async with asyncio.timeout(ANSWER_TIMEOUT_S):
                        await handle.cut(purpose, dispatch)
            except WorkerLost as error:
                await self._replace(member, handle, error)

    async def _take(self) -> tuple[_Member, RolloutHandle]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or self._free())
            if self._failure is not None:
                raise self._failure
            member = min(self._free(), key=lambda item: (item.num_groups, item.index))
            member.num_groups += 1
            assert member.handle is not None
            return member, member.handle

    def _free(self) -> list[_Member]:
        return [
            member
            for member in self._members
            if member.handle is not None
            and not member.is_behind
            and member.num_groups < self._max_groups
        ]

    async def _give_back(self, member: _Member) -> None:
        member.num_groups -= 1
        async with self._changed:
            self._changed.notify_all()

    async def metrics(self) -> list[dict[str, float]]:
        """Return what the engines of the living workers have done since each was opened.

        One that does not answer in time is left out.

        Raises:
            WorkerLost: see :meth:`run_group`.
        """
        return await self._ask_every(lambda handle: handle.metrics(), METRICS_TIMEOUT_S)

    async def _ask_every(
        self, question: Callable[[RolloutHandle], Awaitable[T]], timeout_s: float
    ) -> list[T]:
        """Return the answers of the living workers that answer in time; replace the lost ones."""
        found: list[T] = []

        async def ask(_: _Member, handle: RolloutHandle) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    found.append(await question(handle))

        await self._on_every(ask)
        return found

    # ------------------------------------------------------------------ lost workers

    async def _replace(self, member: _Member, handle: RolloutHandle, error: WorkerLost) -> None:
        """Begin to replace a lost process, once, whoever notices it first.

        Raises:
            WorkerLost: there were too many.
        """
        if member.handle is not handle:
            return
        member.handle = None
        if self.num_restarts >= self._max_restarts:
            lost = WorkerLost(
                f"{member.label} is gone, and cluster.max_restarts={self._max_restarts} lost "
                f"rollout workers were replaced before: {error}; if it ran out of memory, lower "
                "rollout.concurrency or use fewer rollout.workers on a node; the run can be resumed"
            )
            await self._fail(lost)
            await handle.close()
            raise lost from error
        self.num_restarts += 1
        logger.warning("%s is gone and is being replaced: %s", member.label, error)
        task = asyncio.create_task(self._rejoin(member, handle), name=f"replace {member.label}")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _rejoin(self, member: _Member, lost: RolloutHandle) -> None:
        """Open a new process with the current weights; whatever goes wrong ends the run."""
        await lost.close()
        await self._awake.wait()
        opened: RolloutHandle | None = None
        try:
            opened, _ = await self._open(member)
            async with self._control:
                await self._catch_up(member, opened)
                member.handle = opened  # not before it has weights
            async with self._changed:
                self._changed.notify_all()
        except WorkerLost as error:
            member.handle = opened or lost
            with suppress(WorkerLost):  # too many of them: whoever waits is told
                await self._replace(member, member.handle, error)
        except BaseException as error:
            if opened is not None:
                await opened.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            await self._fail(error)

    async def _catch_up(self, member: _Member, opened: RolloutHandle) -> None:
        """Give a new process the weights that the others have, and have it sleep if they do.

        Raises:
            WorkerTimeout: it hangs; everybody waits for it.
        """
        if self._direct is not None:  # it has deadlines of its own, and may wait for an update
            channel, version = self._direct
            caught_up = await channel.catch_up(version, opened, member.label)
            member.is_behind = not caught_up  # training has gone on: an update is near
        try:
            async with asyncio.timeout(self._start_timeout_s):
                if self._shipment is not None:
                    served = await opened.load(self._shipment)
                    refuse_other_weights(self._shipment, served, where=member.label)
                if self._asleep:
                    await opened.sleep(self._asleep)
        except TimeoutError:
            raise WorkerTimeout(
                f"{member.label} was replaced and did not take the weights, or sleep, within "
                f"cluster.start_timeout_s={self._start_timeout_s} s: its engine hangs, or the "
                "network is slow; the run can be resumed, with a higher value if need be"
            ) from None

    async def _fail(self, error: BaseException) -> None:
        async with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ------------------------------------------------------------------ weights, devices

    async def load(self, shipment: Shipment, *, timeout_s: float) -> None:
        """Return once every worker samples from ``shipment``; a lost one loads it when replaced.

        Raises:
            EngineError: an engine refused the weights, serves others than were sent, or has not
                loaded them in time.
            WorkerLost: see :meth:`run_group`.
        """

        async def load_into(member: _Member, handle: RolloutHandle) -> None:
            served = await handle.load(shipment)
            refuse_other_weights(shipment, served, where=member.label)

        async with self._control:
            self._shipment, self._direct = shipment, None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._on_every(load_into)
            except TimeoutError:
                raise EngineError(
                    f"not every rollout worker samples version {shipment.version} after "
                    f"weight_sync.timeout_s={timeout_s} s: requests are unfinished, or the network "
                    "is slow; raise it, or lower rollout.max_turn_tokens"
                ) from None

    async def transport(self, channel: DirectChannel) -> str:
        """Return the transport that a channel to these workers would take.

        Raises:
            EngineError, WorkerLost: see :meth:`update`.
        """
        return await self._together(lambda found: channel.choose([handle for _, handle in found]))

    async def update(self, channel: DirectChannel, version: int) -> None:
        """Return once every worker samples the weights that training ranks have now.

        Workers that are lost meanwhile are replaced, and the others updated from the start.

        Raises:
            EngineError: see :meth:`~agentrl.dist.weight_sync.direct.DirectChannel.publish`.
            WorkerLost: see :meth:`run_group`.
        """

        async def publish(found: Sequence[tuple[_Member, RolloutHandle]]) -> None:
            self._direct, self._shipment = (channel, version), None
            handles, labels = [item[1] for item in found], [item[0].label for item in found]
            await channel.publish(version, handles, labels)
            for member, _ in found:
                member.is_behind = False

        await self._together(publish)
        async with self._changed:
            self._changed.notify_all()

    async def _together(
        self, call: Callable[[Sequence[tuple[_Member, RolloutHandle]]], Awaitable[T]]
    ) -> T:
        """Call with all living workers, of which there is one at least, until none is lost in it.

        Raises:
            BaseException: what ``call`` raised while no process went.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._failure is not None or self._living())
            async with self._control:
                if self._failure is not None:
                    raise self._failure
                found, before = self._living(), self.num_restarts
                if not found:
                    continue
                try:
                    return await call(found)
                except (EngineError, WorkerLost):
                    # Where a process has gone, others may be the first to complain.
                    await self._ask_every(lambda handle: handle.weight_target(), ANSWER_TIMEOUT_S)
                    if self.num_restarts == before:
                        raise

    def _living(self) -> list[tuple[_Member, RolloutHandle]]:
        return [(item, item.handle) for item in self._members if item.handle is not None]

    async def sleep(self, level: int = 1) -> None:
        """Have every engine give its device away. No request may be unfinished.

        Raises:
            WorkerTimeout: a process hangs.
            WorkerLost: see :meth:`run_group`.
        """
        async with self._control:
            self._asleep = level
            self._awake.clear()
            await self._hand_over("given its device away", lambda handle: handle.sleep(level))

    async def wake(self) -> None:
        """Undo :meth:`sleep`; raises as it does."""
        async with self._control:
            self._asleep = 0
            await self._hand_over("taken its device again", lambda handle: handle.wake())
            self._awake.set()

    async def _hand_over(self, what: str, call: Callable[[RolloutHandle], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(DEVICE_TIMEOUT_S):
                await self._on_every(lambda _, handle: call(handle))
        except TimeoutError:
            raise WorkerTimeout(
                f"not every rollout worker has {what} after {DEVICE_TIMEOUT_S:g} s: a process "
                "hangs; look at its log in Ray's. The run can be resumed"
            ) from None

    async def _on_every(self, call: Callable[[_Member, RolloutHandle], Awaitable[Any]]) -> None:
        """Call every living worker at once; the lost ones are replaced.

        Raises:
            BaseException: what the first call raised, once all have ended.
        """
        if self._failure is not None:
            raise self._failure

        async def one(member: _Member, handle: RolloutHandle) -> None:
            try:
                await call(member, handle)
            except WorkerLost as error:
                await self._replace(member, handle, error)

        results = await asyncio.gather(
            *(one(member, handle) for member, handle in self._living()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
