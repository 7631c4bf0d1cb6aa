"""Test programs and solutions that meet only in values, run here without any sandbox."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
from typing import Any

import pytest

from agentrl.errors import RewardError, SandboxError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus
from agentrl.sandbox.grading import ProgramVerdict, check_program
from agentrl.testing import FakeSandboxes

OK = SandboxStatus.OK


class Interpreter:
    """A sandbox that isolates nothing: cells in one namespace, private programs in their own."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self.sources: list[str] = []
        self.override: ExecResult | None = None

    async def run_code(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        self.sources.append(code)
        if self.override is not None:
            return self.override
        tree = ast.parse(code)
        last: Any = tree.body.pop()
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(compile(tree, "cell", "exec"), self.space)
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), self.space)
            except SystemExit:
                return ExecResult(status=SandboxStatus.STATE_LOST, error="ended")
        return ExecResult(status=OK, result=repr(value), duration_s=0.1)

    async def run_private(
        self, source: str, payload: bytes, *, timeout_s: float | None = None
    ) -> ExecResult:
        self.sources.append(payload.decode())
        replies: list[bytes] = []
        exec(source, {"PAYLOAD": payload, "reply": replies.append})
        return ExecResult(status=OK, private=b"".join(replies))

    async def close(self) -> None:
        pass


class Boxes:
    def __init__(self) -> None:
        self.made: list[Interpreter] = []
        self.override: ExecResult | None = None

    async def acquire(self, limits: SandboxLimits | None = None) -> Any:
        box = Interpreter()
        if self.made:  # the second one holds the solution
            box.override = self.override
        self.made.append(box)
        return box


def check(source: str, tests: str, boxes: Boxes | None = None, **options: Any) -> ProgramVerdict:
    settings: dict[str, Any] = {"entry_point": "f", "timeout_s": 5.0}
    return asyncio.run(
        check_program(boxes or Boxes(), source=source, tests=tests, **settings | options)
    )


DOUBLES = "def f(x):\n    return 2 * x"
TESTS = "def check(c):\n    assert c(2) == 4\n    assert c(x='ab') == 'abab'\n    assert f(1) == 2"


def test_right_solutions_pass_and_wrong_ones_say_why() -> None:
    assert check(DOUBLES, TESTS) == ProgramVerdict(passed=True, num_calls=3)
    wrong = check("def f(x):\n    return 4", TESTS)
    assert (wrong.passed, wrong.error, wrong.num_calls) == (False, "AssertionError: ", 2)


def test_neither_side_sees_the_others_source() -> None:
    boxes = Boxes()
    check(DOUBLES + "  # SOLUTION", TESTS + "  # EXPECTED", boxes)
    tester, solution = boxes.made
    assert not any("SOLUTION" in source for source in tester.sources)
    assert not any("EXPECTED" in source for source in solution.sources)


def test_what_the_solution_keeps_from_call_to_call_stays() -> None:
    counter = "n = 0\ndef f():\n    global n\n    n += 1\n    return n"
    assert check(counter, "def check(c):\n    assert [c() for _ in range(20)][-1] == 20").passed


@pytest.mark.parametrize(
    "tests",
    [
        "def check(c):\n    try:\n        c()\n    except TypeError:\n        return\n    assert 0",
        "import random\ndef check(c):\n    for i in range(9):\n"
        "        n = random.Random(i).random()\n        assert c(n) == 2 * n",
        "def check(c):\n    assert c((1, 2)) == (1, 2, 1, 2) and c({'a'} and 1.5) == 3.0",
    ],
)
def test_exceptions_randomness_and_types_travel(tests: str) -> None:
    verdict = check(DOUBLES, tests)
    assert verdict.passed, verdict


def test_the_preamble_is_there_for_both() -> None:
    preamble = "import math\ndef half(x):\n    return x / 2"
    source = "from __future__ import annotations\ndef f(x):\n    return half(x) * math.pi"
    tests = "def check(c):\n    assert c(2) == half(2) * math.pi"
    assert check(source, tests, preamble=preamble).passed


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    raise SystemExit(0)",
        "raise SystemExit(0)",
        "def f(x:",
        "g = 1",
        "f = 5",
        "import __main__\ndef f(x):\n    return object()",
        "def f(x):\n    return 'x' * 300_000",
        "class E(Exception):\n    def __str__(self): 1 / 0\ndef f(x): raise E",
    ],
)
def test_a_solution_that_does_not_answer_fails(source: str) -> None:
    assert not check(source, TESTS).passed


@pytest.mark.parametrize("status", [SandboxStatus.TIMEOUT, SandboxStatus.OOM, SandboxStatus.ERROR])
def test_a_limit_that_the_solution_hits_is_its_own_failure(status: SandboxStatus) -> None:
    boxes = Boxes()
    boxes.override = ExecResult(status=status, error="stopped")
    verdict = check(DOUBLES, TESTS, boxes)
    assert not verdict.passed and verdict.error == "stopped"
    expected = SandboxStatus.STATE_LOST if status is SandboxStatus.ERROR else status
    assert verdict.status is expected


def test_its_time_is_counted_over_all_calls() -> None:
    tests = "def check(c):\n    assert [c(i) for i in range(50)]"
    verdict = check(DOUBLES, tests, timeout_s=1.0)  # each cell takes .1 s here
    assert (verdict.passed, verdict.status) == (False, SandboxStatus.TIMEOUT)


def test_a_failure_of_ours_is_not_the_solutions() -> None:
    boxes = Boxes()
    boxes.override = ExecResult(status=SandboxStatus.INFRA_ERROR, error="broken")
    with pytest.raises(SandboxError, match="broken"):
        check(DOUBLES, TESTS, boxes)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("def check(c):\n    c(lambda: 1)", "type function"),
        ("def check(c):\n    for i in range(10**6): c(i)", "more than 512"),
    ],
)
def test_tests_that_cannot_be_run_like_this_are_refused(tests: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        check("def f(x):\n    return 1", tests, timeout_s=1000.0)


def test_tests_that_swallow_everything_still_wait_for_the_answer() -> None:
    tests = (
        "def check(c):\n    try:\n        value = c(2)\n    except BaseException:\n"
        "        value = 4\n    assert value == 4\n    c(3)"
    )
    assert check(DOUBLES, tests) == ProgramVerdict(passed=True, num_calls=2)


@pytest.mark.parametrize("wrong", [{"tests": "("}, {"tests": "a\0"}, {"preamble": "def"}])
def test_tests_that_are_no_python_are_the_authors_fault_and_need_no_sandbox(wrong: dict[str, str]):
    options: Any = {"source": "", "entry_point": "f", "tests": "", "timeout_s": 1.0, **wrong}
    with pytest.raises(RewardError, match="no Python program"):
        asyncio.run(check_program(FakeSandboxes(), **options))
