"""Arithmetic word tasks: the model calls the calculator, reads its answers, and states a number.

The episode ends with the first message without a tool call. Its answer counts if it holds exactly
one ``Answer: NUMBER``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.env.base import Demonstration, Env, Episode, Observation
from agentrl.types import Action, Score, Task
from agentrl_envs.calculator import demos, stories

_ANSWER = re.compile(r"Answer:\s*(-?[0-9]+)(?!\w|[.,]\d)")


class AnswerRubric:
    """1 for the right number in the stated form, 0 otherwise."""

    def score(self, episode: Episode) -> Score:
        """Read the last assistant message, if it ended the episode."""
        final = episode.info.get("final")
        success = final is not None and parse_answer(final) == episode.task.data["answer"]
        return Score(reward=float(success), success=success)


class Calculator(Env):
    """Word tasks that take a tool and two or three steps.

    ``step`` only says whether the episode is over: a message without a tool call ends it. All
    reward is the outcome.
    """

    tools = ("calculator",)
    rubric = AnswerRubric()

    def tasks(self, split: str) -> Sequence[Task]:
        """See :func:`agentrl_envs.calculator.stories.tasks`."""
        return stories.tasks(split)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """State the task."""
        task = self.pick_task(seed, options)
        return [
            {"role": "system", "content": demos.SYSTEM_PROMPT},
            {"role": "user", "content": task.data["prompt"]},
        ], {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Go on while the model calls tools; the first message without a call is final.

        One that a token limit cut short states no answer.
        """
        if action.tool_calls:
            return "", 0.0, False, False, {}
        final = None if action.truncated else action.content
        return "", 0.0, True, False, {"final": final}

    def snapshot(self) -> None:
        """Return nothing: what was said is all the state there is."""

    def restore(self, state: None) -> None:
        """See :meth:`snapshot`."""

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """See :func:`agentrl_envs.calculator.demos.demonstrations`."""
        return demos.demonstrations(self.tasks(split), split, seed)


def parse_answer(text: str) -> int | None:
    """Return the number of the one ``Answer: NUMBER`` in ``text``.

    None where there is none, or more than one: a text that states two answers states none.
    """
    answers = _ANSWER.findall(text)
    if len(answers) != 1 or text.count("Answer:") != 1 or len(answers[0]) > 9:
        return None
    return int(answers[0])
