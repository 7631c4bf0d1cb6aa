"""Grading: the submission runs in a fresh sandbox, and what it returned is compared out here.

Only inputs enter the sandbox, never an expected value (:mod:`agentrl.sandbox.grading`), so there is
nothing in there to find or to patch. HumanEval's tests are programs that must run beside the
submission: there a submission that goes looking for the verdict could forge it. It is the
benchmark's own design; do not train on it with a policy that hunts for rewards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl.env.base import Episode
from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxProvider, SandboxStatus
from agentrl.sandbox.grading import call_function
from agentrl.types import Score
from agentrl_envs.code_sandbox.problem import Example, Problem, problem_of
from agentrl_envs.code_sandbox.values import equal

_CALLER = "__call_with_keywords"
_TEST_PROGRAM = """
import json
job = json.loads(PAYLOAD)
verdict = "passed"
try:
    space = {"__name__": "solution"}
    exec(compile(job["preamble"], "preamble.py", "exec"), space)
    tests = dict(space)  # tests may use the helpers that the prompt gives
    exec(compile(job["source"], "solution.py", "exec"), space)
    candidate = tests[job["entry_point"]] = space[job["entry_point"]]
    exec(compile(job["test_program"], "tests.py", "exec"), tests)
    tests["check"](candidate)
except BaseException as error:
    verdict = type(error).__name__
reply(json.dumps({"verdict": verdict}).encode())
"""


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
        )

    async def _hidden(self, episode: Episode, problem: Problem) -> float:
        source: str | None = episode.info.get("submission")
        if source is None:
            return 0.0
        if problem.test_program is not None:
            passed = await passes_program(episode.sandboxes, problem, source, self._timeout_s)
            return float(passed)
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
    entry_point = problem.entry_point
    source = f"{problem.preamble}\n{source}"
    args_list: list[Sequence[Any]] = [list(example.args) for example in examples]
    if any(example.kwargs for example in examples):
        # Defined after the submission, which therefore cannot replace it.
        source += f"\n\ndef {_CALLER}(args, kwargs):\n    return {entry_point}(*args, **kwargs)\n"
        entry_point = _CALLER
        args_list = [[list(example.args), dict(example.kwargs)] for example in examples]
    sandbox = await sandboxes.acquire()
    try:
        outcomes = await call_function(
            sandbox,
            source=source,
            entry_point=entry_point,
            args_list=args_list,
            timeout_s=timeout_s,
        )
    finally:
        await sandbox.close()
    passed = [
        outcome.status is SandboxStatus.OK and same(outcome.value, example.expected)
        for outcome, example in zip(outcomes, examples, strict=True)
    ]
    return sum(passed) / len(passed)


async def passes_program(
    sandboxes: SandboxProvider, problem: Problem, source: str, timeout_s: float
) -> bool:
    """Return whether ``source`` passes the problem's test program, in a fresh sandbox.

    Raises:
        SandboxError: infrastructure failed.
    """
    job = {
        "preamble": problem.preamble,
        "source": source,
        "test_program": problem.test_program,
        "entry_point": problem.entry_point,
    }
    sandbox = await sandboxes.acquire()
    try:
        result = await sandbox.run_private(
            _TEST_PROGRAM, json.dumps(job).encode(), timeout_s=timeout_s
        )
    finally:
        await sandbox.close()
    if result.status is SandboxStatus.INFRA_ERROR:
        raise SandboxError(f"the sandbox failed: {result.error}")
    return result.status is SandboxStatus.OK and result.private == b'{"verdict": "passed"}'


def same(got: Any, expected: Any) -> bool:
    """Compare as :func:`~agentrl_envs.code_sandbox.values.equal` does; never raises.

    ``got`` comes from untrusted code, so it may be nested or large enough to break a comparison.
    """
    try:
        return equal(got, expected)
    except (RecursionError, OverflowError):
        return False
