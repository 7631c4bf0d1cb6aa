"""A rubric made of named, weighted parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.env.base import Episode
from agentrl.env.table import converted
from agentrl.errors import ConfigError, RewardError
from agentrl.finite import check_reward, got
from agentrl.reward.part import Grade, Part
from agentrl.types import BUILT_IN_REWARDS, Score

Graded = Sequence[tuple[Part, Grade]]
Success = Callable[[Mapping[str, float]], bool]
"""``(values by name) -> bool``: the values of the parts and everything that they measured."""


class ComposedRubric:
    """Grades an episode by the weighted sum of its parts; they run concurrently.

    ::

        rubric = ComposedRubric(
            Part("correct", is_correct, weight=1.0, timeout_s=5),
            Part("format", Format(r"<answer>.*</answer>"), weight=0.1),
        )
        score = await rubric.score(episode)
        score.reward   # 1.0 * correct + 0.1 * format
        score.parts    # {"correct": 1.0, "format": 1.0}
        score.success  # correct > 0

    ``Score.parts`` holds the raw value of every part under its name. What a part measures beside
    its value stands there too: entries of a mapping as ``part/entry``, parts of a
    :class:`~agentrl.types.Score` under the names that it gave them.

    A part that raises, is late, or returns no finite number fails the whole grading with an error
    that names it: an episode never gets a reward that lacks a part.

    Args:
        parts: at least one, with distinct names.
        success: the name of the part that decides (the first one unless given), or a function of
            the values by name.
        above: the episode succeeded where the deciding part's value is above this. None: that
            part's own verdict where it returned a ``Score``, else 0.

    Raises:
        ConfigError: no parts, a name that is taken, or a deciding part that does not exist.
    """

    def __init__(
        self, *parts: Part, success: str | Success | None = None, above: float | None = None
    ) -> None:
        if not parts:
            raise ConfigError("a composed rubric needs at least one part")
        for part in parts:
            if not isinstance(part, Part):
                raise ConfigError(f"a rubric is composed of Part(name, grader), got {got(part)}")
        names = [part.name for part in parts]
        for name in names:
            if name in BUILT_IN_REWARDS:
                raise ConfigError(
                    f"reward part {name!r}: algo.reward_weights means something else by "
                    f"{', '.join(BUILT_IN_REWARDS)}; give the part another name"
                )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"reward part {twice[0]!r} stands there twice; name one otherwise")
        if isinstance(success, str) and success not in names:
            raise ConfigError(f"success={success!r} is no part; the parts are: {', '.join(names)}")
        if callable(success) and above is not None:
            raise ConfigError("give either a function for success or a threshold, not both")
        self.parts = parts
        self._success = success
        self._above = above

    async def score(self, episode: Episode) -> Score:
        """Grade an episode; the first part that fails decides how.

        Raises:
            RewardError: a part raised, was late (``RewardTimeout``), or gave no finite number.
            InfrastructureError, SandboxError: as a part says.
        """
        graded = list(zip(self.parts, await self._grades(episode), strict=True))
        values = _values(graded)
        reward = sum(part.weight * grade.value for part, grade in graded)
        return Score(
            reward=check_reward(float(reward), where="the weighted sum of the reward's parts"),
            success=self._succeeded(graded, values),
            parts=values,
            turn_rewards=_turn_rewards(graded),
            tampering=tuple(dict.fromkeys(name for _, grade in graded for name in grade.tampering)),
        )

    async def open(self) -> None:
        """Open every part; if one cannot be opened, those before it are closed again."""
        opened: list[Part] = []
        try:
            for part in self.parts:
                opened.append(part)
                await part.open()
        except BaseException:
            for part in opened:
                await part.close()
            raise

    async def close(self) -> None:
        """Close every part."""
        for part in self.parts:
            await part.close()

    async def _grades(self, episode: Episode) -> list[Grade]:
        if len(self.parts) == 1:
            return [await self.parts[0].grade(episode)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part.grade(episode)) for part in self.parts]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    def _succeeded(self, graded: Graded, values: Mapping[str, float]) -> bool:
        if callable(self._success):
            passing = (KeyboardInterrupt,)
            with converted("success of the reward", "the function", RewardError, passing=passing):
                verdict: Any = self._success(values)
            if not isinstance(verdict, bool | np.bool_):
                raise RewardError(f"success of the reward must be a bool, got {got(verdict)}")
            return bool(verdict)
        name = self._success or self.parts[0].name
        grade = next(grade for part, grade in graded if part.name == name)
        if self._above is None and grade.success is not None:
            return grade.success
        return grade.value > (self._above or 0.0)


def _values(graded: Graded) -> dict[str, float]:
    values = {part.name: grade.value for part, grade in graded}
    owner = {name: name for name in values}
    for part, grade in graded:
        for name, value in grade.entries.items():
            if name in owner:
                raise RewardError(
                    f"reward part {part.name!r} measures {name!r}, a name that part "
                    f"{owner[name]!r} has taken; rename a part"
                )
            owner[name] = part.name
            values[name] = value
    return values


def _turn_rewards(graded: Graded) -> tuple[float, ...]:
    """Weighted sum per turn; a part that says nothing of a turn pays it 0."""
    length = max(len(grade.turn_rewards) for _, grade in graded)
    total = [0.0] * length
    for part, grade in graded:
        for turn, reward in enumerate(grade.turn_rewards):
            total[turn] += part.weight * reward
    return tuple(total)
