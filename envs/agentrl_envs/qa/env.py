"""One question, one answer: the model writes a text that ends with ``#### ANSWER``.

The rule that says which answer a text states, and which answers are equal, is that of
:mod:`agentrl_envs.qa.answers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.env.base import Demonstration, Env, Episode, Observation
from agentrl.errors import EnvError, RewardError
from agentrl.types import Action, Message, Score, Task
from agentrl_envs.qa import demos, questions
from agentrl_envs.qa.answers import MARKER, reference_answer, same_answer, stated_answer


class AnswerRubric:
    """1 for the right answer in the stated form, 0 otherwise."""

    def score(self, episode: Episode) -> Score:
        """Compare what the model stated with ``task.data["answer"]``.

        Raises:
            RewardError: the task has no answer that can be compared.
        """
        data = episode.task.data
        expected = reference_answer(data.get("answer"))
        if expected is None:
            raise RewardError(
                f"task {episode.task.id!r} has the answer {data.get('answer')!r}; qa compares text "
                f"or a number, with at most one {MARKER}: mend it, name the column in "
                "data.columns.answer, or grade with reward.path"
            )
        final = episode.info.get("final")
        stated = None if final is None else stated_answer(final)
        success = stated is not None and same_answer(stated, expected)
        return Score(reward=float(success), success=success)


class QA(Env):
    """Questions of a file (``data.train=FILE``), or small word questions of its own.

    The model has one turn. A prompt that is text gets ``system_prompt`` in front; chat messages are
    shown as they are.

    Args:
        system_prompt: says how to answer; empty for none.
    """

    rubric = AnswerRubric()

    def __init__(self, system_prompt: str = demos.SYSTEM_PROMPT) -> None:
        self._system_prompt = system_prompt

    def tasks(self, split: str) -> Sequence[Task]:
        """See :func:`agentrl_envs.qa.questions.tasks`."""
        return questions.tasks(split)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Ask the question.

        Raises:
            EnvError: the task has no prompt.
        """
        task = self.pick_task(seed, options)
        prompt = task.data.get("prompt")
        if isinstance(prompt, str) and prompt:
            opening = [_message("system", self._system_prompt)] if self._system_prompt else []
            return [*opening, _message("user", prompt)], {}
        if isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt):
            return prompt, {}
        raise EnvError(
            f"task {task.id!r} has the prompt {prompt!r}; qa wants text or chat messages in "
            "task.data['prompt']: name the column in data.columns.prompt"
        )

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """End the episode. A text that a token limit cut short states no answer."""
        return "", 0.0, True, False, {"final": None if action.truncated else action.content}

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """See :func:`agentrl_envs.qa.demos.demonstrations`: of its own questions, not of a file."""
        return demos.demonstrations(self.tasks(split), split, seed, self._system_prompt)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
