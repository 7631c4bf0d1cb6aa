"""Turning what a supervisor relayed into an :class:`ExecResult`.

The report part was written by the process that ran the untrusted code: it is a claim, bounded in
size, and can only name a status that is the model's own fault.
"""

from __future__ import annotations

import signal
from typing import Any

from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus
from agentrl_sandboxes.supervised.inside import wire

_CLAIMS = {
    "ok": SandboxStatus.OK,
    "error": SandboxStatus.ERROR,
    "memory": SandboxStatus.OOM,
    "pids": SandboxStatus.PIDS_LIMIT,
    "interrupted": SandboxStatus.TIMEOUT,
}
_MAX_ERROR_CHARS = 10_000
_LOST = "The interpreter was replaced: names defined by earlier cells are gone."


def interpret(
    header: dict[str, Any], body: bytes, limits: SandboxLimits, timeout_s: float
) -> ExecResult:
    """Build the result of one execution from the supervisor's answer."""
    parts, position = [], 0
    for length in header["lengths"]:
        parts.append(body[position : position + length])
        position += length
    stdout, stderr, report, private = parts
    result = ExecResult(
        status=SandboxStatus.OK,
        stdout=_decode(stdout, header["cut"][0]),
        stderr=_decode(stderr, header["cut"][1]),
        exit_code=header["exit_code"],
        truncated_bytes=sum(header["cut"]),
        private=private,
        duration_s=header["duration_s"],
        state_lost=header["state_lost"],
    )
    _set_status(result, header["verdict"], report, limits, timeout_s)
    if result.state_lost:
        result.error = f"{result.error}\n{_LOST}" if result.error else _LOST
    return result


def _set_status(
    result: ExecResult, verdict: str, report: bytes, limits: SandboxLimits, timeout_s: float
) -> None:
    reasons = {
        "timeout": (SandboxStatus.TIMEOUT, f"Time limit of {timeout_s:g} s reached."),
        "interrupted": (SandboxStatus.TIMEOUT, f"Time limit of {timeout_s:g} s reached."),
        "oom": (SandboxStatus.OOM, f"Memory limit of {limits.memory_mb} MB exceeded."),
        "pids_limit": (
            SandboxStatus.PIDS_LIMIT,
            f"More than {limits.max_processes} processes and threads.",
        ),
        "output_limit": (
            SandboxStatus.OUTPUT_LIMIT,
            f"Stopped: output far above the limit of {limits.output_bytes} bytes.",
        ),
    }
    if verdict == "out_of_turn":
        result.status, result.state_lost = SandboxStatus.STATE_LOST, True
        result.error = "The program spoke in the place of its interpreter."
    elif verdict in reasons:
        result.status, result.error = reasons[verdict]
    elif report:
        _apply_claim(result, report, limits)
    elif result.exit_code is not None:
        _apply_exit(result, limits)
    if verdict == "done" and result.exit_code is not None and result.state_lost:
        # The cell ended its own interpreter; a claim it sent before does not change that.
        result.status = (
            result.status if result.status is SandboxStatus.TIMEOUT else SandboxStatus.STATE_LOST
        )


def _apply_claim(result: ExecResult, report: bytes, limits: SandboxLimits) -> None:
    try:
        claim = wire.parse_header(report)
    except wire.FrameError as error:
        result.status, result.error = SandboxStatus.ERROR, str(error)
        return
    kind, code = claim.get("kind"), claim.get("exit_code")
    if kind == "exit" and isinstance(code, int):
        result.exit_code = code
        result.status = SandboxStatus.OK if code == 0 else SandboxStatus.ERROR
    else:
        result.status = _CLAIMS.get(str(kind), SandboxStatus.ERROR)
    most = limits.output_bytes + _MAX_ERROR_CHARS
    result.result = _text_or_none(claim.get("result"), most)
    result.error = _text_or_none(claim.get("error"), most)
    if kind == "exit" and result.status is SandboxStatus.ERROR and result.error is None:
        result.error = f"SystemExit: {result.exit_code}"


def _apply_exit(result: ExecResult, limits: SandboxLimits) -> None:
    code = result.exit_code
    if code == 0:
        return
    result.status = SandboxStatus.ERROR
    if code is None or code > 0:
        result.error = f"Exited with code {code}."
    elif -code == signal.SIGXCPU:
        result.status = SandboxStatus.TIMEOUT
        result.error = f"CPU time limit of {limits.cpu_s:g} s reached."
    else:
        result.error = f"Ended by signal {-code} ({_signal_name(-code)})."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _decode(data: bytes, cut: int) -> str:
    text = data.decode("utf-8", "replace")
    return f"{text}\n... [{cut} bytes cut]" if cut else text


def _text_or_none(value: object, max_chars: int) -> str | None:
    """An honest interpreter stays below the bound; a forged report may not."""
    return value[:max_chars] if isinstance(value, str) else None
