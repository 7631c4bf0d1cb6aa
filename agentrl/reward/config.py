"""Settings of the reward. Imports no torch, so that a command line can compose it fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Solution(StrEnum):
    """Which text of an episode is graded as its solution. Named as written."""

    last_turn = "last_turn"
    """What the model said last."""
    all_turns = "all_turns"
    """Everything the model said, turns joined by a newline; nothing that tools or the environment
    answered."""


@dataclass(slots=True, kw_only=True)
class RewardPartConfig:
    """One weighted part of the reward."""

    id: str
    """``env`` (what the environment's own rubric says), ``function``, ``format``, ``overlong``,
    ``judge``, ``hf_classifier``, another registered id, or an import path of a grader."""
    name: str = ""
    """Unique; names the part in metrics and in ``algo.reward_weights``. Empty: the id."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the part, checked against its signature."""
    weight: float = 1.0
    """Of its value in the outcome reward; 0 only measures it."""
    timeout_s: float | None = None
    """For one episode. None: ``rollout.reward_timeout_s``."""


@dataclass(slots=True, kw_only=True)
class OverlongConfig:
    """DAPO's soft punishment of trajectories that come close to their token limit."""

    buffer_tokens: int = 0
    """How long before ``rollout.max_response_tokens`` it sets in; 0 is off."""
    penalty: float = 1.0
    """What is taken off at the limit itself; it grows linearly over the buffer."""


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """What an episode is worth. Nothing set: what the environment's own rubric says."""

    path: str | None = None
    """``./file.py:function`` or ``package.module:function`` that grades in place of the
    environment's rubric: the first part, named ``score``."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of that function, checked against its signature."""
    solution: Solution = Solution.last_turn
    """What a function with verl's signature gets as ``solution_str``."""
    process: bool | None = None
    """Run the function in child processes, which a hang cannot outlive. None: if it is in a file.
    A coroutine function that uses sandboxes needs false."""
    parts: list[RewardPartConfig] = field(default_factory=list)
    """Weighted parts that replace the environment's rubric; ``{id: env}`` brings it back in."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Added to whatever else is graded."""
    success_part: str | None = None
    """The part that decides on success. None: the first one."""
    success_threshold: float | None = None
    """An episode succeeded where that part's value is above. None: the part's own verdict where it
    has one (``env``), else 0."""

    @property
    def replaces_rubric(self) -> bool:
        """Whether anything is set, so that the run grades and not the environment alone."""
        return bool(self.path or self.parts or self.overlong.buffer_tokens)
