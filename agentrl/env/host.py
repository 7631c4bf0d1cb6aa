"""Synchronous environments as coroutines with deadlines.

::

    hosts = EnvHosts(config.env, reward_timeout_s=30.0)
    env = await hosts.open()              # on a thread, or in a child process
    observation, info = await env.reset(seed=1, options={"task": task})
    ...
    score = await env.rubric.score(episode)
    await env.close()
    await hosts.close()

Where things run:

* A synchronous environment and its synchronous rubric: on one of ``env.threads`` threads, or in a
  child process; the environment stays where it was opened.
* An asynchronous rubric: on the event loop of the caller. That of an environment in a child process
  is pickled once, when the environment opens, so it sees the episode and not the environment.
* An :class:`~agentrl.env.base.AsyncEnv`: on the event loop of the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env.async_host import AsyncHostedEnv, score_on_loop
from agentrl.env.base import Episode, Observation
from agentrl.env.config import EnvConfig
from agentrl.env.hosted import Hosted, HostedRubric
from agentrl.env.lane import Lane, ThreadWorker
from agentrl.env.process import ProcessWorker
from agentrl.env.registry import env_class, is_async_class, runs_in_process
from agentrl.env.table import EnvFacts, EnvSource, ResetAnswer, StepAnswer
from agentrl.errors import AgentRLError, ConfigError, InfrastructureError, ThreadLeakError
from agentrl.kwargs import check_kwargs
from agentrl.types import Action, Score


@dataclass(slots=True, kw_only=True)
class HostStats:
    """What went wrong so far."""

    num_timeouts: int = 0
    num_abandoned_threads: int = 0
    num_lost_processes: int = 0
    num_close_errors: int = 0


class EnvHosts:
    """Opens environments of one configuration and owns the threads and processes they run on.

    Args:
        config: which environment, and the deadlines.
        reward_timeout_s: seconds a rubric may take for one episode.
        cls: the class itself in place of ``config.id``; then only threads can host it.

    Raises:
        RegistryError, ConfigError: no such environment, or arguments it does not take.
    """

    def __init__(
        self, config: EnvConfig, *, reward_timeout_s: float = 30.0, cls: type | None = None
    ) -> None:
        resolved = cls or env_class(config.id)
        check_kwargs(resolved, config.kwargs, key="env.kwargs")
        self.config = config
        self.reward_timeout_s = reward_timeout_s
        self.stats = HostStats()
        self.is_async = is_async_class(resolved)
        self.in_process = self._decide_process(cls)
        self._source = EnvSource(
            env_id=config.id or resolved.__name__, kwargs=config.kwargs, cls=cls
        )
        self._lanes: list[Lane] = []
        self._abandoned: list[ThreadWorker] = []
        self._keys = itertools.count()
        self._fatal: AgentRLError | None = None

    async def open(self) -> Hosted:
        """Construct an environment.

        Raises:
            EnvError, EnvTimeout, InfrastructureError, ThreadLeakError: see :class:`Hosted`.
        """
        if self._fatal is not None:
            raise self._fatal
        if self.is_async:
            return AsyncHostedEnv(self._source, self.config, reward_timeout_s=self.reward_timeout_s)
        lane = self._least_loaded_lane()
        env = _LaneEnv(self, lane, next(self._keys), self._source.env_id)
        lane.num_envs += 1
        try:
            await env.open(self._source)
        except BaseException:  # also a cancelled caller: the environment may open later
            env.discard()
            raise
        return env

    async def close(self) -> None:
        """End every thread and process. Hung threads stay behind as daemons. Idempotent."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
        for lane in lanes:
            if isinstance(lane.worker, ProcessWorker):
                await lane.worker.wait_closed(self.config.close_timeout_s)

    @property
    def num_leaked_threads(self) -> int:
        """Abandoned threads whose call has not returned to this day."""
        self._abandoned = [worker for worker in self._abandoned if worker.is_alive]
        return len(self._abandoned)

    # ------------------------------------------------------------- lanes

    def _decide_process(self, cls: type | None) -> bool:
        if cls is None:
            return not self.is_async and runs_in_process(self.config.id, self.config.process)
        if self.config.process:
            raise ConfigError(
                f"env.process=True needs env.id, which a child process can import; got the class "
                f"{cls.__qualname__} itself; set env.id='package.module:{cls.__qualname__}'"
            )
        return False

    def _least_loaded_lane(self) -> Lane:
        limit = self.config.processes if self.in_process else self.config.threads
        lane = min(self._lanes, key=lambda lane: lane.num_envs, default=None)
        if lane is None or (lane.num_envs > 0 and len(self._lanes) < limit):
            worker = ProcessWorker if self.in_process else ThreadWorker
            try:
                lane = Lane(worker, self._lane_died)
            except (OSError, RuntimeError) as error:  # no process, thread or file is left
                raise InfrastructureError(
                    f"environment {self._source.env_id!r}: no "
                    f"{'process' if self.in_process else 'thread'} could be started for it: {error}"
                ) from error
            self._lanes.append(lane)
        return lane

    def _lane_died(self, lane: Lane) -> AgentRLError | None:
        if lane in self._lanes:  # its place is taken by a new lane when one is needed
            self._lanes.remove(lane)
        self.stats.num_timeouts += lane.timed_out
        if isinstance(lane.worker, ProcessWorker):
            self.stats.num_lost_processes += 1
            return None
        self.stats.num_abandoned_threads += 1
        if isinstance(lane.worker, ThreadWorker):
            self._abandoned.append(lane.worker)
        if self.num_leaked_threads > self.config.max_leaked_threads:
            self._fatal = ThreadLeakError(
                f"{self.num_leaked_threads} threads hang in environment {self._source.env_id!r}, "
                f"more than env.max_leaked_threads={self.config.max_leaked_threads}; mend the "
                "environment, or set env.process=true so that a hang can be ended"
            )
        return self._fatal


class _LaneEnv:
    """An environment on a thread or in a child process."""

    def __init__(self, hosts: EnvHosts, lane: Lane, key: int, env_id: str) -> None:
        self.env_id = env_id
        self.tools: tuple[str, ...] = ()
        self.artifacts: tuple[str, ...] = ()
        self.rubric: HostedRubric | None = None
        self._hosts = hosts
        self._lane = lane
        self._key = key
        self._label = f"environment {env_id!r}"
        self._anchor: str | None = None
        self._tool_state: dict[str, Mapping[str, Any]] = {}
        self._closed = False

    async def open(self, source: EnvSource) -> None:
        facts: EnvFacts = await self._call("open", (source,), self._hosts.config.reset_timeout_s)
        self.tools, self.artifacts = facts.tools, facts.artifacts
        if facts.has_rubric:
            self.rubric = _LaneRubric(self, facts)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        task = (options or {}).get("task")
        self._label = (
            f"environment {self.env_id!r} (task {getattr(task, 'id', None)!r}, seed {seed})"
        )
        answer: ResetAnswer = await self._call(
            "reset", (seed, options), self._hosts.config.reset_timeout_s
        )
        self._anchor = answer.anchor
        self._tool_state = answer.tool_state
        return answer.observation, answer.info

    async def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        answer: StepAnswer = await self._call("step", (action,), self._hosts.config.step_timeout_s)
        self._anchor = answer.anchor
        return (
            answer.observation, answer.reward, answer.terminated, answer.truncated, answer.info,
        )  # fmt: skip

    async def tool_state(self, tool: str) -> Mapping[str, Any]:
        if tool not in self._tool_state:
            self._tool_state[tool] = await self._call(
                "tool_state", (tool,), self._hosts.config.step_timeout_s
            )
        return self._tool_state[tool]

    async def anchor(self) -> str | None:
        return self._anchor

    async def snapshot(self) -> bytes:
        return await self._call("snapshot", (), self._hosts.config.step_timeout_s)

    async def restore(self, state: bytes) -> None:
        self._anchor = await self._call("restore", (state,), self._hosts.config.step_timeout_s)

    async def score(self, episode: Episode) -> Score:
        return await self._call("score", (episode,), self._hosts.reward_timeout_s)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._lane.num_envs -= 1
        if self._lane.dead is not None:
            return
        try:
            await self._call("close", (), self._hosts.config.close_timeout_s)
        except ThreadLeakError:
            raise
        except AgentRLError:
            self._hosts.stats.num_close_errors += 1

    def discard(self) -> None:
        """Close without waiting."""
        self._closed = True
        self._lane.num_envs -= 1
        future = self._lane.call(
            "close", self._key, (), timeout_s=self._hosts.config.close_timeout_s, label=self._label
        )
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        if self._hosts._fatal is not None:
            raise self._hosts._fatal
        return await self._lane.call(
            method, self._key, args, timeout_s=timeout_s, label=self._label
        )


class _LaneRubric:
    """Grades where the rubric belongs: beside its environment, or on the event loop."""

    def __init__(self, env: _LaneEnv, facts: EnvFacts) -> None:
        self._env = env
        self._async_rubric = facts.async_rubric

    async def score(self, episode: Episode) -> Score:
        if self._async_rubric is None:
            return await self._env.score(episode)
        return await score_on_loop(
            self._async_rubric,
            episode,
            label=self._env._label,
            timeout_s=self._env._hosts.reward_timeout_s,
        )


__all__ = ["EnvHosts", "HostStats"]
