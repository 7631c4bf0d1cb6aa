"""Calling a function that the model wrote, with its answers compared on the host.

The sandbox sees the solution and the *inputs*, never an expected value. So the worst a solution
can do is to forge its own answers for inputs that it sees, which is what computing them is.
Answers come as bounded JSON on a descriptor that the program's output never reaches, and are
decoded here by a parser that knows only builtin containers. A solution that ends its process,
hangs, or runs out of memory fails the calls that it did not answer; only a failure witnessed on
our side is one of infrastructure, and raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox import values
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxStatus

MAX_ANSWER_BYTES = 262_144
"""An encoded answer above this size counts as wrong, not as a failure of ours."""

_HARNESS = f"""
def __agentrl_harness():
{values.CODEC_SOURCE}
    job = json.loads(PAYLOAD)

    def answer(index, **fields):
        line = json.dumps({{"call": index, **fields}}).encode() + b"\\n"
        if len(line) > {MAX_ANSWER_BYTES}:
            line = json.dumps({{"call": index, "error": "the returned value is too large"}})
            line = line.encode() + b"\\n"
        reply(line)

    def describe(error):
        try:
            name = type(error).__name__
            return {{"error": f"{{name}}: {{error}}"[:500], "exception": name[:100]}}
        except BaseException:
            return {{"error": "an exception that cannot be shown"}}

    space = {{"__name__": "solution"}}
    try:
        exec(compile(job["preamble"], "preamble.py", "exec"), space)
        exec(compile(job["source"], "solution.py", "exec"), space)
        function = space[job["entry_point"]]
    except Exception as error:
        missing = isinstance(error, KeyError) and job["entry_point"] not in space
        answer(-1, **({{"error": f"{{job['entry_point']}} is not defined"}} if missing
                      else describe(error)))
        return
    for index, call in enumerate(job["calls"]):
        try:
            args, kwargs = decode(call)
            answer(index, value=encode(function(*args, **kwargs)))
        except Exception as error:
            answer(index, **describe(error))

__agentrl_harness()
"""


@dataclass(slots=True, kw_only=True)
class CallOutcome:
    """How one call of the model's function ended."""

    status: SandboxStatus
    """`ok`: it returned. `error`: it raised, or returned what cannot be compared. Else the
    limit that ended the process before this call was answered."""
    value: Any = None
    """The returned value, made of builtin containers and scalars."""
    error: str | None = None
    exception: str | None = None
    """Name of the class of what it raised, as the program says."""


async def call_function(
    sandbox: Sandbox,
    *,
    source: str,
    entry_point: str,
    args_list: Sequence[Sequence[Any]],
    kwargs_list: Sequence[Mapping[str, Any]] | None = None,
    preamble: str = "",
    timeout_s: float | None = None,
) -> list[CallOutcome]:
    """Call `entry_point` of `source` once per element of `args_list`, in a fresh process.

    Args:
        sandbox: best one of its own, since files of earlier runs are visible to the program.
        source: the program text that defines the function.
        entry_point: the function's name.
        args_list: positional arguments of each call: builtin scalars and containers.
        kwargs_list: keyword arguments of each call; none if None.
        preamble: trusted source that runs before the program, in the same namespace.
        timeout_s: for all calls together.

    Returns:
        One outcome per call, in order.

    Raises:
        SandboxError: infrastructure failed; nothing is known about the solution.
        ValueError: an argument is no builtin scalar or container.
    """
    keywords = [{} for _ in args_list] if kwargs_list is None else kwargs_list
    calls = [
        values.encode((tuple(args), dict(kwargs)))
        for args, kwargs in zip(args_list, keywords, strict=True)
    ]
    job = {"preamble": preamble, "source": source, "entry_point": entry_point, "calls": calls}
    result = await sandbox.run_private(_HARNESS, json.dumps(job).encode(), timeout_s=timeout_s)
    if result.status is SandboxStatus.INFRA_ERROR:
        raise SandboxError(f"the sandbox failed: {result.error}")
    return _outcomes(result, len(calls))


def _outcomes(result: ExecResult, num_calls: int) -> list[CallOutcome]:
    answers: dict[int, CallOutcome] = {}
    for line in result.private.split(b"\n"):
        parsed = parse_answer(line)
        # The first answer counts: a program cannot take one back.
        if parsed is not None and -1 <= parsed[0] < num_calls:
            answers.setdefault(*parsed)
    unanswered = answers.pop(-1, None) or _explain_silence(result)
    return [answers.get(index, unanswered) for index in range(num_calls)]


def _explain_silence(result: ExecResult) -> CallOutcome:
    status = result.status
    if status is SandboxStatus.OK:
        status = SandboxStatus.ERROR
    return CallOutcome(
        status=status,
        error=result.error or "the program ended before it answered this call",
    )


def parse_answer(line: bytes) -> tuple[int, CallOutcome] | None:
    """Read one line that the untrusted process may have forged; None if it is no answer."""
    if not line or len(line) > MAX_ANSWER_BYTES:
        return None
    try:
        fields = json.loads(line)
        index = fields["call"]
        if type(index) is not int:
            return None
        if "value" in fields:
            value = values.decode(fields["value"])
            return index, CallOutcome(status=SandboxStatus.OK, value=value)
        error, exception = str(fields["error"])[:500], fields.get("exception")
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return None
    return index, CallOutcome(
        status=SandboxStatus.ERROR,
        error=error,
        exception=exception if isinstance(exception, str) else None,
    )
