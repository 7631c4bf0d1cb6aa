"""What the model reads of an execution in a sandbox."""

from __future__ import annotations

from agentrl.errors import SandboxError
from agentrl.sandbox.base import ExecResult, SandboxStatus

MAX_ERROR_CHARS = 300
NO_OUTPUT = "(no output)"
"""The answer where nothing was printed: an empty message says less."""

_OURS = (SandboxStatus.SANDBOX_DEAD, SandboxStatus.INFRA_ERROR)
_CUT = "bytes cut]"
"""In the marker that a backend puts where it cut a stream."""
_TAIL_CHARS = 40
_RESTARTED = "python was restarted: all names are lost"


def refuse_our_failures(result: ExecResult) -> None:
    """Let an execution that failed on our side be no answer.

    Raises:
        SandboxError: it did.
    """
    if result.status in _OURS:
        raise SandboxError(f"{result.status}: {result.error or 'no reason given'}")


def describe(result: ExecResult, *, wall_s: float, last: str = "") -> str:
    """Return a result as the model reads it: as short as it can be without losing anything.

    Args:
        wall_s: how long it might take.
        last: what to say of the end of an execution that no limit ended.
    """
    notes = {
        SandboxStatus.TIMEOUT: f"timeout: stopped after {wall_s:g} s",
        SandboxStatus.OOM: "out of memory",
        SandboxStatus.PIDS_LIMIT: "too many processes or threads",
    }
    note = notes.get(result.status, last)
    is_told = any(_CUT in stream[-_TAIL_CHARS:] for stream in (result.stdout, result.stderr))
    cut = f"[{result.truncated_bytes} more bytes]" if result.truncated_bytes and not is_told else ""
    lost = result.state_lost or result.status is SandboxStatus.STATE_LOST
    restarted = _RESTARTED if lost else ""
    parts = (result.stdout, cut, result.stderr, result.result or "", note, restarted)
    return "\n".join(part.rstrip("\n") for part in parts if part.strip()) or NO_OUTPUT


def shorten(text: str, max_chars: int) -> str:
    """Leave out the middle of a long text: its end says how the command went."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return (
        f"{text[:half]}\n[{len(text) - 2 * half} characters left out; write to a file and view "
        f"parts of it]\n{text[len(text) - half :]}"
    )


def last_line(traceback: str | None) -> str:
    """Return the line of a traceback that says what happened, cut to a bounded length."""
    lines = [line for line in (traceback or "").splitlines() if line.strip()]
    return lines[-1][:MAX_ERROR_CHARS] if lines else ""
