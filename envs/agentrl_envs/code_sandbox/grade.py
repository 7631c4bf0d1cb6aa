"""Grading: the submission runs in a fresh sandbox, and what it returned is compared elsewhere.

Only inputs enter its sandbox, never an expected value (:mod:`agentrl.sandbox.grading`), so there is
nothing in there to find or to patch: values are compared out here, and test programs, such as those
of HumanEval, run in a sandbox of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env.base import Episode
from agentrl.sandbox.base import SandboxProvider, SandboxStatus
from agentrl.sandbox.grading import (
    TAMPERING,
    call_function,
    check_program,
    find_tampering,
)
from agentrl.types import Score
from agentrl_envs.code_sandbox.problem import Example, Problem, problem_of
from agentrl_envs.code_sandbox.values import equal


class CodeRubric:
    """Grades ``info["submission"]`` on the hidden tests.

    Args:
        binary: pay 1 for a full pass and 0 otherwise, rather than the fraction passed.
        visible_reward: what the turns of an episode may earn together for passing more of the
            visible examples than any turn before. Found by grading each turn's submission, not by
            believing what the sandbox printed.
        timeout_s: for all tests of one submission.
    """

    def __init__(self, *, binary: bool, visible_reward: float, timeout_s: float) -> None:
        self._binary = binary
        self._visible_reward = visible_reward
        self._timeout_s = timeout_s

    async def score(self, episode: Episode) -> Score:
        """Grade the submission.

        Raises:
            SandboxError: ours; nothing is known about the submission.
        """
        problem = problem_of(episode.task.data)
        fraction = await self._hidden(episode, problem)
        success = fraction == 1.0
        return Score(
            reward=float(success) if self._binary else fraction,
            success=success,
            parts={"tests_passed": fraction},
            turn_rewards=await self._progress(episode, problem) if self._visible_reward else (),
            tampering=_tampering(episode),
        )

    async def _hidden(self, episode: Episode, problem: Problem) -> float:
        source: str | None = episode.info.get("submission")
        if source is None:
            return 0.0
        if problem.test_program is not None:
            verdict = await check_program(
                episode.sandboxes,
                source=source,
                entry_point=problem.entry_point,
                tests=problem.test_program,
                preamble=problem.preamble,
                timeout_s=self._timeout_s,
            )
            return float(verdict.passed)
        return await fraction_passed(
            episode.sandboxes, problem, source, problem.hidden, self._timeout_s
        )

    async def _progress(self, episode: Episode, problem: Problem) -> list[float]:
        rewards: list[float] = []
        best, graded = 0.0, {None: 0.0}
        for source in episode.info.get("submissions", ()):
            if source not in graded:
                graded[source] = await fraction_passed(
                    episode.sandboxes, problem, source, problem.visible, self._timeout_s
                )
            rewards.append(self._visible_reward * max(0.0, graded[source] - best))
            best = max(best, graded[source])
        return rewards


def _tampering(episode: Episode) -> tuple[str, ...]:
    """Return the patterns of reward hacking in the submission and in the cells before it."""
    cells = [
        code
        for turn in episode.turns
        for call in turn.tool_calls
        if isinstance(code := call.arguments.get("code"), str)
    ]
    submission = episode.info.get("submission") or ""
    found = {name for text in (submission, *cells) for name in find_tampering(text)}
    return tuple(name for name in TAMPERING if name in found)


async def fraction_passed(
    sandboxes: SandboxProvider,
    problem: Problem,
    source: str,
    examples: Sequence[Example],
    timeout_s: float,
) -> float:
    """Return the fraction of ``examples`` that ``source`` passes, in a fresh sandbox.

    Raises:
        SandboxError: infrastructure failed.
    """
    if not examples:
        return 0.0
    sandbox = await sandboxes.acquire()
    try:
        outcomes = await call_function(
            sandbox,
            preamble=problem.preamble,
            source=source,
            entry_point=problem.entry_point,
            args_list=[list(example.args) for example in examples],
            kwargs_list=[example.kwargs for example in examples],
            timeout_s=timeout_s,
        )
    finally:
        await sandbox.close()
    passed = [
        outcome.status is SandboxStatus.OK and same(outcome.value, example.expected)
        for outcome, example in zip(outcomes, examples, strict=True)
    ]
    return sum(passed) / len(passed)


def same(got: Any, expected: Any) -> bool:
    """Compare as :func:`~agentrl_envs.code_sandbox.values.equal` does; never raises.

    ``got`` comes from untrusted code, so it may be nested or large enough to break a comparison.
    """
    try:
        return equal(got, expected)
    except (RecursionError, OverflowError):
        return False
