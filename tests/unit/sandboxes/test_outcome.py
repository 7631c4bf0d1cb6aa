"""From what a supervisor relayed to a typed result."""

from __future__ import annotations

import json

import pytest
from agentrl_sandboxes.supervised.outcome import interpret
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus

LIMITS = SandboxLimits(memory_mb=64, max_processes=8)


def outcome(
    report: bytes = b"",
    *,
    verdict: str = "done",
    exit_code: int | None = None,
    state_lost: bool = False,
    stdout: bytes = b"",
    cut: int = 0,
) -> ExecResult:
    header = {
        "verdict": verdict,
        "exit_code": exit_code,
        "state_lost": state_lost,
        "lengths": [len(stdout), 0, len(report), 0],
        "cut": [cut, 0],
        "duration_s": 0.5,
    }
    return interpret(header, stdout + report, LIMITS, 2.0)


@pytest.mark.parametrize(
    ("verdict", "status", "says"),
    [
        ("timeout", SandboxStatus.TIMEOUT, "2 s"),
        ("interrupted", SandboxStatus.TIMEOUT, "2 s"),
        ("oom", SandboxStatus.OOM, "64 MB"),
        ("pids_limit", SandboxStatus.PIDS_LIMIT, "8 processes"),
        ("output_limit", SandboxStatus.OUTPUT_LIMIT, "65536 bytes"),
    ],
)
def test_a_limit_wins_over_what_the_program_claims(verdict, status, says):
    claim = json.dumps({"kind": "ok", "result": "fine"}).encode()
    result = outcome(claim, verdict=verdict)
    assert result.status is status and says in (result.error or "")


@given(
    st.binary(max_size=200)
    | st.dictionaries(st.text(), st.text()).map(lambda d: json.dumps(d).encode())
)
def test_no_claim_can_name_a_failure_of_ours(report):
    assert outcome(report).status not in (
        SandboxStatus.INFRA_ERROR,
        SandboxStatus.SANDBOX_DEAD,
        SandboxStatus.STATE_LOST,
    )


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (0, SandboxStatus.OK, None),
        (3, SandboxStatus.ERROR, "code 3"),
        (-11, SandboxStatus.ERROR, "SIGSEGV"),
        (-24, SandboxStatus.TIMEOUT, "CPU time"),
        (-63, SandboxStatus.ERROR, "signal 63"),
    ],
)
def test_a_command_is_judged_by_its_exit(code, status, says):
    result = outcome(exit_code=code)
    assert (result.status, result.exit_code) == (status, code)
    assert says is None if result.error is None else says in result.error


def test_a_lost_state_is_said_in_words_too():
    result = outcome(exit_code=0, state_lost=True)
    assert result.status is SandboxStatus.STATE_LOST and result.state_lost
    assert "names defined by earlier cells are gone" in (result.error or "")


@given(st.binary(max_size=100), st.integers(0, 10**12))
def test_decoding_never_raises_and_a_cut_is_marked(stdout, cut):
    result = outcome(stdout=stdout, cut=cut)
    assert result.truncated_bytes == cut
    assert (f"[{cut} bytes cut]" in result.stdout) == (cut > 0)
