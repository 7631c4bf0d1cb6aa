"""A grading function in child processes: what survives a hang that holds the interpreter lock.

The processes are those that environments run in (:mod:`agentrl.env.process`). Each grades one
episode at a time, so that a function that has to be killed takes no other grading with it. Sync or
async makes no difference: a coroutine that blocks holds nothing but its own child.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import resource
import sys
from collections.abc import Mapping
from typing import Any

from agentrl.env.base import Env, Episode
from agentrl.env.lane import Lane
from agentrl.env.process import ProcessWorker
from agentrl.env.table import EnvSource, converted
from agentrl.errors import EnvError, RewardError, RewardTimeout
from agentrl.reward.config import Solution
from agentrl.reward.function import RewardFunction
from agentrl.reward.part import as_grade
from agentrl.sandbox.base import Sandbox, SandboxLimits
from agentrl.types import Score

OPEN_TIMEOUT_S = 60.0
"""For a child to start and import the function's module."""
CLOSE_TIMEOUT_S = 5.0
DEFAULT_MEMORY_MB = 4096


class FunctionEnv(Env):
    """Holds a grading function in a child process, as the rubric of an environment.

    Args:
        path: ``./file.py:function`` or ``package.module:function``.
        part: name of the part that it grades for.
        kwargs, solution: see :class:`~agentrl.reward.function.RewardFunction`.
        memory_mb: see :class:`ProcessFunction`.
    """

    def __init__(
        self, path: str, part: str, kwargs: dict[str, Any], solution: str, memory_mb: int
    ) -> None:
        with converted(path, "making it", RewardError):
            function = RewardFunction(path, kwargs=kwargs, solution=Solution(solution))
        _bound_memory(memory_mb << 20)
        self.rubric = _FunctionRubric(function, part)


def _bound_memory(num_bytes: int) -> None:
    """Refuse this process more data than it holds now and ``num_bytes`` on top (Linux)."""
    if sys.platform != "linux":
        return
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    _, ceiling = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + num_bytes
    if ceiling != resource.RLIM_INFINITY:
        limit = min(limit, ceiling)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, ceiling))


class _FunctionRubric:
    """Errors name the function; the part is named by the main process."""

    def __init__(self, function: RewardFunction, part: str) -> None:
        self._function = function
        self._part = part
        # One loop for all episodes: what a coroutine keeps (a client) belongs to a loop.
        self._runner = asyncio.Runner()

    def score(self, episode: Episode) -> Score:
        """Call the function."""
        episode = dataclasses.replace(episode, sandboxes=_NoSandboxes(self._function.name))
        with converted(self._function.name, "the function", RewardError):
            value = self._function(episode)
            if inspect.isawaitable(value):
                value = self._runner.run(_awaited(value))
        grade = as_grade(value, part=self._part, label=self._function.name)
        return Score(
            reward=grade.value,
            success=grade.value > 0 if grade.success is None else grade.success,
            parts=grade.entries,
            turn_rewards=grade.turn_rewards,
            tampering=grade.tampering,
        )


async def _awaited(value: Any) -> Any:
    try:
        return await value
    except asyncio.CancelledError as error:
        raise RewardError(
            "the function raised CancelledError, though nothing cancelled it"
        ) from error


class _NoSandboxes:
    def __init__(self, path: str) -> None:
        self._path = path

    async def acquire(self, limits: SandboxLimits | None = None) -> Sandbox:
        """Refuse.

        Raises:
            RewardError: always.
        """
        raise RewardError(
            f"{self._path}: the sandboxes are in the main process; set reward.process=false (in "
            "reward.parts: kwargs.process) and make it a coroutine function, which then runs there"
        )


class ProcessFunction:
    """A function as a grader, in up to ``processes`` children that are started when needed.

    Args:
        path: as in :class:`FunctionEnv`; checked in this process before.
        part: name of the part that it grades for.
        processes: children at most; further episodes wait, which is not held against them.
        memory_mb: what grading may take beyond what a child held once the function was imported;
            above it a MemoryError fails the grading, so that text which is made to explode in a
            parser costs its own episode only.
    """

    def __init__(
        self,
        path: str,
        *,
        part: str,
        kwargs: Mapping[str, Any] | None = None,
        solution: Solution = Solution.last_turn,
        processes: int = 4,
        memory_mb: int = DEFAULT_MEMORY_MB,
    ) -> None:
        self._path = path
        self._source = EnvSource(
            env_id=path,
            cls=FunctionEnv,
            kwargs={
                "path": path,
                "part": part,
                "kwargs": dict(kwargs or {}),
                "solution": str(solution),
                "memory_mb": memory_mb,
            },
        )
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[Lane] = []
        self._busy: set[Lane] = set()

    async def open(self) -> None:
        """Start one child, so that what it cannot import is known at the start."""
        self._idle.append(await self._start())

    async def grade(self, episode: Episode, *, timeout_s: float) -> Score:
        """Grade an episode; a child that is late is killed with all that it started.

        Raises:
            RewardError: the function raised, or returned no finite number; ``RewardTimeout``: it
                was late. Its process ended: RewardError too.
        """
        async with self._slots:
            lane = self._idle.pop() if self._idle else await self._start()
            self._busy.add(lane)
            try:
                return await self._call(lane, "score", (episode,), timeout_s)
            except RewardTimeout as error:
                if not lane.timed_out:
                    raise
                raise RewardTimeout(
                    f"{self._path}: no answer within timeout_s={timeout_s:g}"
                ) from error
            except asyncio.CancelledError:
                lane.worker.abandon()  # it still grades an episode that nobody waits for
                lane.lost("the caller was cancelled")
                raise
            finally:
                self._busy.discard(lane)
                if lane.dead is None:
                    self._idle.append(lane)

    async def close(self) -> None:
        """End every child."""
        lanes = [*self._idle, *self._busy]
        self._idle.clear()
        for lane in lanes:
            lane.close()
        for lane in lanes:
            if isinstance(lane.worker, ProcessWorker):
                await lane.worker.wait_closed(CLOSE_TIMEOUT_S)

    async def _start(self) -> Lane:
        start_worker = functools.partial(ProcessWorker, owner="the reward function's")
        lane = Lane(start_worker, lambda lane: None)
        try:
            await self._call(lane, "open", (self._source,), OPEN_TIMEOUT_S)
        except BaseException:
            if lane.dead is None:
                lane.worker.abandon()
                lane.close()
            raise
        return lane

    async def _call(self, lane: Lane, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            return await lane.call(method, 0, args, timeout_s=timeout_s, label=self._path)
        except EnvError as error:  # to a lane, whatever it holds is an environment
            raise RewardError(str(error)) from error
