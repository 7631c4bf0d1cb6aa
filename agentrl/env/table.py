"""Environments by key, and the calls on them.

The same table serves a thread of this process and a child process: whoever owns it runs one call
after the other, and what comes back is checked here, next to the environment.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.base import Env, Episode, Observation, Rubric
from agentrl.env.registry import make_env
from agentrl.env.validate import (
    check_anchor,
    check_artifacts,
    check_reset,
    check_rubric,
    check_score,
    check_step,
    check_tools,
)
from agentrl.errors import AgentRLError, ConfigError, EnvError, RewardError, ToolError
from agentrl.kwargs import check_kwargs
from agentrl.types import Action, Score


@dataclass(slots=True, frozen=True, kw_only=True)
class EnvSource:
    """How to construct an environment."""

    env_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    cls: type | None = None
    """Given in place of an id; then the environment cannot run in another process."""

    def make(self) -> Any:
        """Construct it.

        Raises:
            RegistryError, ConfigError, EnvError: see :func:`~agentrl.env.registry.make_env`.
        """
        if self.cls is None:
            return make_env(self.env_id, self.kwargs)
        check_kwargs(self.cls, self.kwargs, key="env.kwargs")
        return self.cls(**self.kwargs)


@dataclass(slots=True, frozen=True, kw_only=True)
class EnvFacts:
    """What the loop needs to know of an environment before the first call."""

    tools: tuple[str, ...]
    artifacts: tuple[str, ...]
    has_rubric: bool
    async_rubric: Rubric | None
    """The rubric itself where its ``score`` is a coroutine: it runs on the caller's event loop."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ResetAnswer:
    """The answer to ``reset``, with all that can be asked in the same visit."""

    observation: Observation
    info: dict[str, Any]
    anchor: str | None
    tool_state: dict[str, Mapping[str, Any]]


@dataclass(slots=True, frozen=True, kw_only=True)
class StepAnswer:
    """The answer to ``step``."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    anchor: str | None


@dataclass(slots=True)
class _Entry:
    env: Env
    label: str
    name: str
    tools: tuple[str, ...]


class EnvTable:
    """Open environments. Not thread-safe: one owner runs every call.

    Every method raises only errors of :mod:`agentrl.errors`; an exception of the environment
    becomes :class:`~agentrl.errors.EnvError` (of its rubric: :class:`~agentrl.errors.RewardError`)
    with the traceback as a note.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def handle(self, method: str, key: int, args: tuple[Any, ...]) -> Any:
        """Run ``method`` (open, reset, step, snapshot, ...) on environment ``key``."""
        return getattr(self, method)(key, *args)

    def open(self, key: int, source: EnvSource) -> EnvFacts:
        """Construct environment ``key``."""
        name = f"environment {source.env_id!r}"
        with converted(name, "the constructor"):
            env = source.make()
        if not isinstance(env, Env):
            raise EnvError(f"{name}: {type(env).__name__} is no agentrl.Env")
        with converted(name, "tools, artifacts or rubric"):  # each may be a property
            tools = check_tools(env.tools, env=name)
            artifacts = check_artifacts(env.artifacts, env=name)
            rubric = env.rubric
            check_rubric(rubric, env=name)
        self._entries[key] = _Entry(env, name, name, tools)
        is_async = rubric is not None and inspect.iscoroutinefunction(rubric.score)
        return EnvFacts(
            tools=tools,
            artifacts=artifacts,
            has_rubric=rubric is not None,
            async_rubric=rubric if is_async else None,
        )

    def reset(self, key: int, seed: int | None, options: dict[str, Any] | None) -> ResetAnswer:
        """Begin an episode."""
        entry = self._entries[key]
        task = (options or {}).get("task")
        entry.label = f"{entry.name} (task {getattr(task, 'id', None)!r}, seed {seed})"
        with converted(entry.label, "reset"):
            value = entry.env.reset(seed=seed, options=options)
        observation, info = check_reset(value, env=entry.label)
        states = {tool: self.tool_state(key, tool) for tool in entry.tools}
        return ResetAnswer(
            observation=observation,
            info=info,
            anchor=self._anchor(entry),
            tool_state=states,
        )

    def step(self, key: int, action: Action) -> StepAnswer:
        """Answer one turn."""
        entry = self._entries[key]
        with converted(entry.label, "step"):
            value = entry.env.step(action)
        observation, reward, terminated, truncated, info = check_step(value, env=entry.label)
        return StepAnswer(
            observation=observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=info,
            anchor=self._anchor(entry),
        )

    def tool_state(self, key: int, tool: str) -> Mapping[str, Any]:
        """Return what ``tool`` needs to know of the task."""
        entry = self._entries[key]
        with converted(entry.label, "tool_state"):
            state = entry.env.tool_state(tool)
        if not isinstance(state, Mapping):
            raise EnvError(
                f"{entry.label}: tool_state({tool!r}) must return a mapping, "
                f"got {type(state).__name__}"
            )
        return state

    def snapshot(self, key: int) -> bytes:
        """Return the present state, pickled: later steps cannot change it any more."""
        entry = self._entries[key]
        with converted(entry.label, "snapshot"):
            state = entry.env.snapshot()
        return pickled_state(state, env=entry.label)

    def restore(self, key: int, state: bytes) -> str | None:
        """Go on from ``state``; return the anchor there."""
        entry = self._entries[key]
        with converted(entry.label, "restore"):
            entry.env.restore(pickle.loads(state))
        return self._anchor(entry)

    def score(self, key: int, episode: Episode) -> Score:
        """Run a synchronous rubric."""
        entry = self._entries[key]
        rubric = entry.env.rubric
        if rubric is None:
            raise RewardError(f"{entry.label}: the environment has no rubric any more")
        with converted(entry.label, "the rubric", RewardError):
            value = rubric.score(episode)
        if inspect.isawaitable(value):
            raise RewardError(
                f"{entry.label}: the rubric returned an awaitable from a plain function; "
                "write `async def score`"
            )
        return check_score(value, env=entry.label)

    def close(self, key: int) -> None:
        """Close environment ``key`` and forget it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            with converted(entry.label, "close"):
                entry.env.close()

    def close_all(self) -> None:
        """Close what is still open; errors are of no use to anyone any more."""
        for key in list(self._entries):
            try:
                self.close(key)
            except AgentRLError:
                continue

    def _anchor(self, entry: _Entry) -> str | None:
        if type(entry.env).anchor is Env.anchor:
            return None
        with converted(entry.label, "anchor"):
            anchor = entry.env.anchor()
        return check_anchor(anchor, env=entry.label)


@contextmanager
def converted(
    label: str,
    method: str,
    error_class: type[AgentRLError] = EnvError,
    *,
    passing: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Turn whatever an environment raises into an error with a name.

    Errors of agentrl pass: an environment may say for itself that infrastructure failed. A
    ``ToolError`` is the model's affair inside a tool only; here it is a bug like any other.
    ``SystemExit`` and ``KeyboardInterrupt`` raised by an environment are its bugs too; on the main
    thread, where a ``KeyboardInterrupt`` may be the user's, it belongs into ``passing``.
    """
    try:
        yield
    except ConfigError:
        raise
    except AgentRLError as error:
        if isinstance(error, ToolError):
            raise _named(error, label, method, error_class) from error
        raise
    except (GeneratorExit, asyncio.CancelledError, *passing):
        raise
    except BaseException as error:
        raise _named(error, label, method, error_class) from error


def pickled_state(state: Any, *, env: str) -> bytes:
    """Return what ``snapshot`` gave as bytes.

    Raises:
        EnvError: it cannot be pickled.
    """
    try:
        return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise EnvError(
            f"{env}: what snapshot returned cannot be pickled: {type(error).__name__}: {error}; "
            "return plain data, and make threads, files and connections anew in restore"
        ) from error


def _named(
    error: BaseException, label: str, method: str, error_class: type[AgentRLError]
) -> AgentRLError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    try:
        text = str(error)
    except Exception:  # an exception of the environment's own making
        text = "(no message)"
    named = error_class(f"{label}: {method} raised {type(error).__name__}: {text[:500]}{place}")
    named.add_note("".join(traceback.format_exception(error))[-4000:])
    return named
