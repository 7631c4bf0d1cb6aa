"""One named, weighted part of a rubric: whatever grades, with a deadline and a checked answer."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from agentrl.env.base import Episode, Rubric
from agentrl.env.table import converted
from agentrl.env.validate import check_score
from agentrl.errors import AgentRLError, ConfigError, RewardError, RewardTimeout
from agentrl.finite import check_reward, got
from agentrl.reward.threads import grader_threads
from agentrl.tool.deadline import DeadlinePassed, within
from agentrl.types import Score

DEFAULT_TIMEOUT_S = 30.0


@runtime_checkable
class TimedGrader(Protocol):
    """A grader that waits for its turn before its clock starts, and so keeps its own deadline."""

    async def grade(self, episode: Episode, *, timeout_s: float) -> Any:
        """Return a float, a :class:`~agentrl.types.Score` or a mapping with ``score``.

        Raises:
            RewardServiceError, RewardTimeout: no answer within ``timeout_s`` of work.
        """
        ...


Grader: TypeAlias = Callable[[Episode], Any] | Rubric | TimedGrader
"""What may grade: a function of the episode, sync or async, a rubric, or a timed grader.

It returns a finite float, a :class:`~agentrl.types.Score`, or a mapping with ``score``, whose other
numbers are measured too. It may have coroutines ``open()`` and ``close()``, which are awaited once
before the first and after the last episode of a run.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class Grade:
    """What one part said of an episode."""

    value: float
    """Raw, before its weight."""
    entries: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name, measured and not added."""
    turn_rewards: tuple[float, ...] = ()
    success: bool | None = None
    """Its own verdict, where it has one."""
    tampering: tuple[str, ...] = ()
    """See :attr:`agentrl.types.Score.tampering`."""


@dataclass(slots=True, frozen=True)
class Part:
    """A named part of a :class:`~agentrl.reward.rubric.ComposedRubric`.

    ::

        Part("correct", is_correct, weight=1.0, timeout_s=5)

    Args:
        name: in ``Score.parts`` and messages.
        grader: see :data:`Grader`.
        weight: of its value in the outcome; 0 only measures.
        timeout_s: seconds for one episode.

    Raises:
        ConfigError: a part that cannot grade, or a bad weight or deadline.
    """

    name: str
    grader: Grader
    _: KW_ONLY
    weight: float = 1.0
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        """Refuse what would only fail in the first episode."""
        if not self.name or not isinstance(self.name, str):
            raise ConfigError(f"a part needs a name, got {self.name!r}")
        if isinstance(self.grader, type) or not (
            callable(self.grader) or callable(getattr(self.grader, "score", None))
            or isinstance(self.grader, TimedGrader)
        ):  # fmt: skip
            raise ConfigError(
                f"{self.label}: give a function of the episode or an object with a method "
                f"score(episode), got {got(self.grader)}"
            )
        try:
            check_reward(self.weight, where=f"{self.label}, weight")
        except RewardError as error:
            raise ConfigError(str(error)) from error
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(
                f"{self.label}: timeout_s={self.timeout_s} must be a finite number above 0"
            )

    @property
    def label(self) -> str:
        """The part, for messages."""
        return f"reward part {self.name!r}"

    async def grade(self, episode: Episode) -> Grade:
        """Grade an episode.

        Raises:
            RewardError: the grader raised, or returned no finite number; ``RewardTimeout``: late.
            InfrastructureError, SandboxError: ours, as the grader says. All name the part.
        """
        with self._named():
            return as_grade(await self._answer(episode), part=self.name)

    async def open(self) -> None:
        """Open the grader where it has something to open."""
        await self._optional("open")

    async def close(self) -> None:
        """Close what :meth:`open` opened."""
        await self._optional("close")

    async def _optional(self, method: str) -> None:
        found = getattr(self.grader, method, None)
        if inspect.iscoroutinefunction(found):
            with self._named():
                await found()

    async def _answer(self, episode: Episode) -> Any:
        if isinstance(self.grader, TimedGrader):
            return await self.grader.grade(episode, timeout_s=self.timeout_s)
        function: Callable[[Episode], Any] = getattr(self.grader, "score", self.grader)  # pyright: ignore[reportAssignmentType]
        try:
            if _is_coroutine_function(function):
                return await within(_awaited(function(episode)), self.timeout_s)
            begun = time.monotonic()
            value = await grader_threads().run(lambda: self._called(function, episode),
                                               self.timeout_s)  # fmt: skip
            if inspect.isawaitable(value):  # a plain function that returns a coroutine
                left_s = max(self.timeout_s - (time.monotonic() - begun), 0.0)
                return await within(_awaited(value), left_s)
            return value
        except DeadlinePassed:
            raise RewardTimeout(f"no answer within timeout_s={self.timeout_s:g}") from None

    def _called(self, function: Callable[[Episode], Any], episode: Episode) -> Any:
        """Call a function on a thread, where a KeyboardInterrupt can only be its own."""
        with converted(self.label, "the grader", RewardError):
            return function(episode)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Have every error name the part, and none be anything but an error of agentrl."""
        try:
            # On this thread a KeyboardInterrupt is the user's, who wants the run to end.
            with converted(self.label, "the grader", RewardError, passing=(KeyboardInterrupt,)):
                yield
        except AgentRLError as error:
            if self.label in str(error):
                raise
            raise type(error)(f"{self.label}: {error}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RewardError(
                f"{self.label}: the grader raised CancelledError, though nothing cancelled it"
            ) from error


def as_grade(value: Any, *, part: str, label: str | None = None) -> Grade:
    """Return what a grader answered.

    Args:
        part: name of the part, under which the entries of a mapping are measured.
        label: of who answered, for messages. None: the part.

    Raises:
        RewardError: no finite number, no Score of finite numbers, or a mapping without ``score``.
    """
    label = label or f"reward part {part!r}"
    if isinstance(value, Score):
        score = check_score(value, env=label)
        return Grade(
            value=score.reward,
            entries=score.parts,
            turn_rewards=tuple(score.turn_rewards),
            success=score.success,
            tampering=tuple(score.tampering),
        )
    if not isinstance(value, Mapping):
        return Grade(value=check_reward(value, where=label))
    if "score" not in value:
        raise RewardError(
            f"{label}: a mapping must hold 'score', got the keys {[*map(str, value)][:20]}"
        )
    entries = {
        # A bool is a count of 0 or 1 here; text and lists are what some functions add for people.
        f"{part}/{key}": check_reward(_as_number(entry), where=f"{label}, entry {key!r}")
        for key, entry in value.items()
        if key != "score" and isinstance(entry, Real | np.bool_)
    }
    return Grade(value=check_reward(value["score"], where=label), entries=entries)


def _as_number(entry: Any) -> Any:
    return int(entry) if isinstance(entry, bool | np.bool_) else entry


def _is_coroutine_function(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function)
        and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    )


async def _awaited(value: Any) -> Any:
    """Await a grader's coroutine in a task of its own, which SystemExit would lead out of."""
    try:
        return await value
    except SystemExit as error:
        raise RewardError(f"the grader raised SystemExit: {error.code!r}") from error
