"""Asynchronous environments and rubrics: on the caller's event loop, each call with a deadline.

A coroutine that blocks the event loop itself cannot be interrupted; an environment that may do so
belongs in a thread (a synchronous :class:`~agentrl.env.base.Env`) or a process.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from agentrl.env.base import AsyncEnv, Episode, Observation, Rubric, missing_for_branching
from agentrl.env.config import EnvConfig
from agentrl.env.hosted import HostedRubric
from agentrl.env.table import EnvSource, converted, pickled_state
from agentrl.env.validate import (
    check_anchor,
    check_artifacts,
    check_reset,
    check_rubric,
    check_score,
    check_step,
    check_tools,
)
from agentrl.errors import AgentRLError, EnvError, EnvTimeout, RewardError, RewardTimeout
from agentrl.types import Action, Score

T = TypeVar("T")


async def with_deadline(
    work: Coroutine[Any, Any, T], *, timeout_s: float, timeout_error: AgentRLError
) -> T:
    """Await ``work`` for at most ``timeout_s`` seconds.

    Unlike ``asyncio.timeout`` this returns on time although ``work`` swallows its cancellation.

    Raises:
        AgentRLError: ``timeout_error``, at the deadline.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.add_done_callback(_retrieve)
        task.cancel()
        raise
    if done:
        return task.result()
    task.add_done_callback(_retrieve)
    task.cancel()
    raise timeout_error


@contextmanager
def _guarded(label: str, method: str, error_class: type[AgentRLError] = EnvError) -> Iterator[None]:
    """As :func:`~agentrl.env.table.converted`, for a task of its own.

    A ``CancelledError`` that nobody asked for is a bug of the environment, not the end of the run.
    """
    try:
        with converted(label, method, error_class):
            yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise error_class(
            f"{label}: {method} raised CancelledError, though nothing cancelled it; "
            "catch it where a task that it awaits may be cancelled"
        ) from error


async def _settled(method: Callable[[], Any]) -> Any:
    """Call ``method``, which may be a coroutine function or, where nothing waits, a plain one."""
    value = method()
    return await value if inspect.isawaitable(value) else value


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # came too late to matter; do not let asyncio report it as lost


async def score_on_loop(rubric: Rubric, episode: Episode, *, label: str, timeout_s: float) -> Score:
    """Await an asynchronous rubric.

    Raises:
        RewardError: it raised or returned no Score; ``RewardTimeout``: it was late.
        SandboxError, InfrastructureError: as the rubric says.
    """

    async def work() -> Score:
        with _guarded(label, "the rubric", RewardError):
            return await rubric.score(episode)

    late = RewardTimeout(
        f"{label}: the rubric did not return within {timeout_s:g} s (rollout.reward_timeout_s)"
    )
    return check_score(
        await with_deadline(work(), timeout_s=timeout_s, timeout_error=late), env=label
    )


class AsyncHostedEnv:
    """An :class:`~agentrl.env.base.AsyncEnv` with deadlines and checked results.

    Raises:
        EnvError: the constructor failed.
    """

    def __init__(self, source: EnvSource, config: EnvConfig, *, reward_timeout_s: float) -> None:
        self.env_id = source.env_id
        self._config = config
        self._label = f"environment {source.env_id!r}"
        with converted(self._label, "the constructor"):
            self._env: AsyncEnv = source.make()
        with converted(self._label, "tools, artifacts or rubric"):
            self.tools = check_tools(self._env.tools, env=self._label)
            wanted = getattr(self._env, "artifacts", ())  # optional in the protocol
            self.artifacts = check_artifacts(wanted, env=self._label)
            check_rubric(self._env.rubric, env=self._label)
        self.rubric: HostedRubric | None = (
            None
            if self._env.rubric is None
            else _LoopRubric(self, self._env.rubric, reward_timeout_s)
        )

    @property
    def label(self) -> str:
        """Environment, task and seed, for messages."""
        return self._label

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See :meth:`agentrl.env.hosted.Hosted.reset`."""
        task = (options or {}).get("task")
        self._label = (
            f"environment {self.env_id!r} (task {getattr(task, 'id', None)!r}, seed {seed})"
        )
        value = await self._timed(
            "reset",
            _settled(lambda: self._env.reset(seed=seed, options=options)),
            self._config.reset_timeout_s,
        )
        return check_reset(value, env=self._label)

    async def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See :meth:`agentrl.env.hosted.Hosted.step`."""
        value = await self._timed(
            "step", _settled(lambda: self._env.step(action)), self._config.step_timeout_s
        )
        return check_step(value, env=self._label)

    async def tool_state(self, tool: str) -> Mapping[str, Any]:
        """See :meth:`agentrl.env.hosted.Hosted.tool_state`."""
        state = await self._timed(
            "tool_state",
            _settled(lambda: self._env.tool_state(tool)),
            self._config.step_timeout_s,
        )
        if not isinstance(state, Mapping):
            raise EnvError(
                f"{self._label}: tool_state({tool!r}) must return a mapping, "
                f"got {type(state).__name__}"
            )
        return state

    async def anchor(self) -> str | None:
        """See :meth:`agentrl.env.hosted.Hosted.anchor`."""
        anchor = getattr(self._env, "anchor", None)
        if anchor is None:
            return None
        value = await self._timed("anchor", _settled(anchor), self._config.step_timeout_s)
        return check_anchor(value, env=self._label)

    async def snapshot(self) -> bytes:
        """See :meth:`agentrl.env.hosted.Hosted.snapshot`."""
        method = self._branching("snapshot")
        state = await self._timed("snapshot", _settled(method), self._config.step_timeout_s)
        return pickled_state(state, env=self._label)

    async def restore(self, state: bytes) -> None:
        """See :meth:`agentrl.env.hosted.Hosted.restore`."""
        method = self._branching("restore")
        await self._timed(
            "restore",
            _settled(lambda: method(pickle.loads(state))),
            self._config.step_timeout_s,
        )

    def _branching(self, name: str) -> Callable[..., Any]:
        if name in missing_for_branching(type(self._env)):
            raise EnvError(
                f"{self._label} has no {name}, which tree sampling needs: write `async def "
                "snapshot` and `async def restore`, or set rollout.tree.rounds=0"
            )
        return getattr(self._env, name)

    async def close(self) -> None:
        """See :meth:`agentrl.env.hosted.Hosted.close`."""
        try:
            await self._timed("close", _settled(self._env.close), self._config.close_timeout_s)
        except AgentRLError:
            return  # nothing depends on it any more

    async def _timed(self, method: str, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        async def guarded() -> T:
            with _guarded(self._label, method):
                return await work

        late = EnvTimeout(f"{self._label}: {method} did not return within {timeout_s:g} s")
        return await with_deadline(guarded(), timeout_s=timeout_s, timeout_error=late)


class _LoopRubric:
    def __init__(self, env: AsyncHostedEnv, rubric: Rubric, timeout_s: float) -> None:
        self._env = env
        self._rubric = rubric
        self._timeout_s = timeout_s

    async def score(self, episode: Episode) -> Score:
        return await score_on_loop(
            self._rubric, episode, label=self._env.label, timeout_s=self._timeout_s
        )
