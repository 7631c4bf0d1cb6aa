"""A test program in one sandbox, the solution in another, and only values between them.

A test program such as ``def check(candidate): assert candidate(2) == 4`` holds the expected values,
so it must not share a process with the solution. Here ``candidate`` is a stand-in: where the tests
call it with arguments that nobody answered yet, their sandbox says so and ends; the solution
answers in a sandbox of its own, and the tests run again from the start with one answer more. Tests
are short and repeat themselves exactly (the hash seed and the random generator are fixed), so
running them once per call is cheap beside being sure.

Arguments and answers travel as :mod:`~agentrl.sandbox.values`: by value. A change that the solution
makes to its arguments does not come back.
"""

from __future__ import annotations

import builtins
import json
from dataclasses import dataclass
from typing import Any

from agentrl.errors import RewardError, SandboxError
from agentrl.sandbox import values
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxProvider, SandboxStatus
from agentrl.sandbox.grading.artifacts import check_source
from agentrl.sandbox.grading.calls import MAX_ANSWER_BYTES, CallOutcome, parse_answer

MAX_CALLS = 512
"""A test program that calls the solution more often is refused."""

_TESTER = f"""
def __agentrl_tests():
{values.CODEC_SOURCE}
    import builtins
    job = json.loads(PAYLOAD)
    answers = job["answers"]
    state = {{"next": 0, "ended": False}}

    class Unanswered(BaseException):
        pass

    def say(**fields):
        if not state["ended"]:
            state["ended"] = True
            reply(json.dumps(fields).encode())

    def candidate(*args, **kwargs):
        index = state["next"]
        if state["ended"] or index == len(answers):
            try:
                say(call=encode((args, kwargs)))
            except ValueError as error:
                say(unsupported=str(error))
            raise Unanswered
        state["next"] += 1
        answer = answers[index]
        if "value" in answer:
            return decode(answer["value"])
        kind = getattr(builtins, answer["exception"], RuntimeError)
        raise kind(answer["error"])

    tests = {{"__name__": "tests"}}
    try:
        exec(compile(job["preamble"], "preamble.py", "exec"), tests)
        tests[job["entry_point"]] = candidate
        exec(compile(job["tests"], "tests.py", "exec"), tests)
        tests[job["entry_point"]] = candidate
        tests["check"](candidate)
        say(passed=True)
    except Unanswered:
        pass
    except BaseException as error:
        say(passed=False, error=f"{{type(error).__name__}}: {{error}}"[:500])

__agentrl_tests()
"""

_SOLUTION = f"""
def __agentrl_solution(preamble, source, entry_point):
{values.CODEC_SOURCE}
    class Answer:
        def __init__(self, **fields):
            self.text = json.dumps({{"call": 0, **fields}})
        def __repr__(self):
            return self.text

    def describe(error):
        try:
            return Answer(error=f"{{type(error).__name__}}: {{error}}"[:500],
                          exception=type(error).__name__[:100])
        except BaseException:
            return Answer(error="an exception that cannot be shown")

    space = {{"__name__": "solution"}}
    try:
        exec(compile(preamble, "preamble.py", "exec"), space)
        exec(compile(source, "solution.py", "exec"), space)
        if entry_point not in space:
            return Answer(error=f"{{entry_point}} is not defined"), None
        function = space[entry_point]
    except Exception as error:
        return describe(error), None

    def call(arguments):
        try:
            args, kwargs = decode(json.loads(arguments))
            return Answer(value=encode(function(*args, **kwargs)))
        except Exception as error:
            return describe(error)

    return Answer(value=True), call

__agentrl_made, __agentrl_call = __agentrl_solution(PREAMBLE, SOURCE, ENTRY_POINT)
__agentrl_made
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ProgramVerdict:
    """What a test program found."""

    passed: bool
    error: str | None = None
    """Why not: what the tests raised, or how the solution failed."""
    num_calls: int = 0
    """Calls of the solution that were answered."""
    status: SandboxStatus = SandboxStatus.OK
    """How the solution's last execution ended; a limit that it hit is a failed test."""


async def check_program(
    sandboxes: SandboxProvider,
    *,
    source: str,
    entry_point: str,
    tests: str,
    preamble: str = "",
    timeout_s: float,
) -> ProgramVerdict:
    """Run ``tests``, which define ``check(candidate)``, against the solution ``source``.

    Args:
        sandboxes: two are taken: one never sees the solution, the other never sees the tests.
        source: the solution; untrusted.
        entry_point: the function of it that is tested; the tests may call it by this name too.
        tests: trusted source; may use what ``preamble`` defines.
        preamble: trusted source that the task gives: runs before both.
        timeout_s: for all calls of the solution together, and again for one run of the tests.

    Raises:
        SandboxError: infrastructure failed; nothing is known about the solution.
        RewardError: the tests themselves cannot be run like this, or are no Python.
    """
    check_source(tests, "the test program")
    check_source(preamble, "the preamble of the tests")
    tester = await sandboxes.acquire()
    try:
        box = await sandboxes.acquire()
        try:
            solution = _Solution(box, (preamble, source, entry_point), timeout_s)
            job = {"preamble": preamble, "entry_point": entry_point, "tests": tests}
            return await _converse(tester, solution, job, timeout_s)
        finally:
            await box.close()
    finally:
        await tester.close()


async def _converse(
    tester: Sandbox, solution: _Solution, job: dict[str, Any], timeout_s: float
) -> ProgramVerdict:
    answers: list[dict[str, Any]] = []
    while True:
        payload = json.dumps({**job, "answers": answers}).encode()
        said = _said(await tester.run_private(_TESTER, payload, timeout_s=timeout_s))
        if "passed" in said:
            error = said.get("error")
            return ProgramVerdict(
                passed=said["passed"] is True, error=error, num_calls=len(answers)
            )
        if len(answers) == MAX_CALLS:
            raise RewardError(f"the test program calls the solution more than {MAX_CALLS} times")
        outcome = await solution.answer(said["call"])
        if outcome.status not in (SandboxStatus.OK, SandboxStatus.ERROR):
            return ProgramVerdict(
                passed=False, error=outcome.error, num_calls=len(answers), status=outcome.status
            )
        answers.append(_as_answer(outcome))


def _said(result: ExecResult) -> dict[str, Any]:
    """Return what the tests said: a call, or a verdict.

    Tests that a value of the solution's makes run on, or fill the memory, did not pass: an honest
    answer does neither, and a failure of the grader would leave the baseline of its group.
    """
    if result.status is SandboxStatus.INFRA_ERROR:
        raise SandboxError(f"the sandbox of the tests failed: {result.error}")
    if not result.private:
        return {"passed": False, "error": f"the tests ended with {result.status}: {result.error}"}
    said = json.loads(result.private)
    if "unsupported" in said:
        raise RewardError(
            f"the test program calls the solution with what cannot be sent: {said['unsupported']}"
        )
    return said


def _as_answer(outcome: CallOutcome) -> dict[str, Any]:
    if outcome.status is SandboxStatus.OK:
        return {"value": values.encode(outcome.value)}
    name = outcome.exception or ""
    kind: Any = getattr(builtins, name, None)
    is_known = isinstance(kind, type) and issubclass(kind, Exception)
    # Of another class than the builtin ones: an exception all the same, which no test expects.
    takes_text = is_known and not issubclass(kind, (UnicodeError, BaseExceptionGroup))
    return {"exception": name if takes_text else "RuntimeError", "error": outcome.error or ""}


class _Solution:
    """The solution in its own sandbox; what it keeps from call to call stays."""

    def __init__(self, box: Sandbox, parts: tuple[str, str, str], timeout_s: float) -> None:
        self._box = box
        self._left_s = timeout_s
        self._define: str | None = f"PREAMBLE, SOURCE, ENTRY_POINT = {parts!r}\n{_SOLUTION}"

    async def answer(self, arguments: Any) -> CallOutcome:
        """Return how the call with the encoded ``arguments`` ended.

        Raises:
            SandboxError: infrastructure failed.
        """
        if self._define is not None:
            define, self._define = self._define, None
            made = await self._run(define)
            if made.status is not SandboxStatus.OK:
                return made
        return await self._run(f"__agentrl_call({json.dumps(arguments)!r})")

    async def _run(self, cell: str) -> CallOutcome:
        if self._left_s <= 0:
            return CallOutcome(status=SandboxStatus.TIMEOUT, error="out of time")
        result = await self._box.run_code(cell, timeout_s=self._left_s)
        self._left_s -= result.duration_s
        if result.status is SandboxStatus.INFRA_ERROR:
            raise SandboxError(f"the sandbox of the solution failed: {result.error}")
        said = (result.result or "").encode("utf-8", "replace")
        parsed = parse_answer(said[: MAX_ANSWER_BYTES + 1])
        if result.status is SandboxStatus.OK and parsed is not None:
            return parsed[1]
        # It ended its process, or replaced what answers: neither is an answer.
        error = result.error or "the solution did not answer"
        ended = result.status in (SandboxStatus.OK, SandboxStatus.ERROR)
        status = SandboxStatus.STATE_LOST if ended else result.status
        return CallOutcome(status=status, error=error)
