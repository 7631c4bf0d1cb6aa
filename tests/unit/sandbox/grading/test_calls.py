"""What the host makes of the answers of an untrusted process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest

from agentrl.errors import SandboxError
from agentrl.sandbox.base import ExecResult, SandboxStatus
from agentrl.sandbox.grading.calls import MAX_ANSWER_BYTES, CallOutcome, call_function


@dataclass
class ReplyingSandbox:
    """Answers every private program with one prepared result, or by running it right here."""

    result: ExecResult | None = None
    payload: bytes = b""

    async def run_private(
        self, source: str, payload: bytes, *, timeout_s: float | None = None
    ) -> ExecResult:
        self.payload = payload
        if self.result is not None:
            return self.result
        replies: list[bytes] = []
        exec(source, {"PAYLOAD": payload, "reply": replies.append})
        return ExecResult(status=SandboxStatus.OK, private=b"".join(replies))


def call(sandbox: ReplyingSandbox, source: str = "", num_calls: int = 2) -> list[CallOutcome]:
    calls = [(number, [number]) for number in range(num_calls)]
    return asyncio.run(
        call_function(sandbox, source=source, entry_point="f", args_list=calls)  # type: ignore[arg-type]
    )


def answering(private: bytes, status: SandboxStatus = SandboxStatus.OK) -> list[CallOutcome]:
    return call(ReplyingSandbox(ExecResult(status=status, private=private, error="why")))


def test_the_program_answers_each_call_on_its_own():
    source = "def f(a, b):\n    b.append(a)\n    return (b, {a: 1 / a})"
    first, second = call(ReplyingSandbox(), source)
    assert (first.status, first.error) == (
        SandboxStatus.ERROR,
        "ZeroDivisionError: division by zero",
    )
    assert second.value == ([1, 1], {1: 1.0})


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("x = 1", "f is not defined"),
        ("f(", "SyntaxError"),
        ("raise ValueError('at import')", "ValueError: at import"),
        ("def f(a): pass", "TypeError"),
        ("f = 5", "TypeError"),
        ("def f(a, b): return object()", "cannot be compared"),
        ("def f(a, b): return 'x' * 1_000_000", "too large"),
        (
            "class E(Exception):\n    def __str__(self): 1 / 0\ndef f(a, b): raise E",
            "cannot be shown",
        ),
    ],
)
def test_every_failure_of_the_solution_is_an_error_with_its_reason(source, error):
    for outcome in call(ReplyingSandbox(), source):
        assert outcome.status is SandboxStatus.ERROR
        assert error in (outcome.error or "")


def test_expected_values_have_no_way_in():
    sandbox = ReplyingSandbox()
    call(sandbox, "def f(a, b): return a")
    assert set(json.loads(sandbox.payload)) == {"preamble", "source", "entry_point", "calls"}


@pytest.mark.parametrize(
    "private",
    [
        b"",
        b"\n\n\n",
        b"not json\n",
        b'{"call": 0}\n',
        b'{"call": "0", "value": 1}\n',
        b'{"call": 7, "value": 1}\n',
        b'{"call": true, "value": 1}\n',
        b'{"call": 0, "value": {"a": 1}}\n',
        b'[{"call": 0, "value": 1}]\n',
        b'{"call": 0, "value": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n",
        b'{"call": 0, "value": ' + b"9" * 100_000 + b"}\n",
        b'{"call": 0, "value": "' + b"x" * MAX_ANSWER_BYTES + b'"}\n',
        b'{"call": 0, "value": 1',
        b"\xff\xfe\x00\n",
    ],
)
def test_what_is_no_answer_fails_the_call_and_nothing_else(private):
    outcomes = answering(private)
    assert [outcome.status for outcome in outcomes] == [SandboxStatus.ERROR] * 2


def test_the_first_answer_to_a_call_counts():
    first, _ = answering(b'{"call": 0, "value": 1}\n{"call": 0, "value": 2}\n')
    assert first.value == 1


@pytest.mark.parametrize(
    "status", [SandboxStatus.TIMEOUT, SandboxStatus.OOM, SandboxStatus.PIDS_LIMIT]
)
def test_calls_left_unanswered_at_a_limit_carry_that_limit(status):
    first, second = answering(b'{"call": 0, "value": 1}\n', status)
    assert (first.status, first.value) == (SandboxStatus.OK, 1)
    assert (second.status, second.error) == (status, "why")


def test_infrastructure_raises_and_a_claim_of_it_does_not():
    with pytest.raises(SandboxError):
        answering(b"", SandboxStatus.INFRA_ERROR)
    (outcome, _) = answering(b'{"call": 0, "error": "infra_error", "status": "infra_error"}\n')
    assert outcome.status is SandboxStatus.ERROR


def test_arguments_must_be_plain_values():
    with pytest.raises(ValueError, match="cannot be compared"):
        asyncio.run(
            call_function(
                ReplyingSandbox(),  # type: ignore[arg-type]
                source="",
                entry_point="f",
                args_list=[(object(),)],
            )
        )
