"""Grading files: taken from the agent's sandbox, judged by a trusted program in a fresh one.

The order is the defence. The files that the task declares are collected; the agent's sandbox ends,
with every process that waited for this moment; the files are written into a sandbox that nobody has
touched, the grader's own files after them, so that theirs win; then the grader runs. Its verdict
comes on a private descriptor together with a number that only the grader's process was told, so
that nothing it starts can speak for it, and it is checked against the range that the task states.
"""

from __future__ import annotations

import base64
import fnmatch
import json
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from agentrl.errors import RewardError, SandboxError, ToolError
from agentrl.finite import check_reward
from agentrl.sandbox.base import ExecResult, Sandbox, SandboxProvider, SandboxStatus

HOOKS = (
    "conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "__pycache__",
    "pytest.ini", "tox.ini", "setup.cfg", ".coveragerc", "noxfile.py", ".git",
)  # fmt: skip
"""Names that change how a project's tests run, rather than what it does: never collected."""
_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,4096}")
_MAX_REPORT_LINES = 10_000

_COLLECTOR = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]  # no module of the agent's
import base64, json, os, stat
job = json.loads(PAYLOAD)
total = count = seen = 0
for folder, folders, names in os.walk(".", followlinks=False):
    folders.sort()
    for name in sorted(names):
        seen += 1
        path = os.path.relpath(os.path.join(folder, name), ".")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            data = file.read(job["max_file_bytes"] + 1)
        too_large = len(data) > job["max_file_bytes"]
        total += 0 if too_large else len(data)
        count += 1
        if count > job["max_files"] or total > job["max_total_bytes"] or seen > 100_000:
            reply(b'{"cut": true}\\n')
            raise SystemExit
        content = None if too_large else base64.b64encode(data).decode()
        reply(json.dumps({"path": path, "data": content}).encode() + b"\\n")
reply(b'{"end": true}\\n')
"""

_GRADER = """
def __agentrl_grader():
    import sys
    sys.path[:] = [entry for entry in sys.path if entry]  # no module of the artifacts
    import collections, json, subprocess
    try:
        import ctypes
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not dumpable: children cannot read our memory
    except (ImportError, OSError, AttributeError):
        pass
    job = json.loads(PAYLOAD)
    Ran = collections.namedtuple("Ran", "exit_code stdout stderr timed_out")

    def report(score, **details):
        reply(json.dumps({"nonce": job["nonce"], "score": score, "details": details}).encode()
              + b"\\n")

    def run(argv, *, stdin=b"", timeout_s=10.0, max_bytes=1_000_000):
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
            return Ran(process.returncode, out[:max_bytes], err[:max_bytes], False)
        except subprocess.TimeoutExpired:
            process.kill()
            return Ran(None, b"", b"", True)

    space = {"__name__": "grader", "report": report, "run": run}
    exec(compile(job["grader"], "grader.py", "exec"), space)

__agentrl_grader()
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ArtifactLimits:
    """What is collected at most."""

    max_files: int = 256
    max_file_bytes: int = 1 << 20
    max_total_bytes: int = 8 << 20


@dataclass(slots=True, frozen=True, kw_only=True)
class Verdict:
    """What a grader found in the artifacts."""

    score: float
    """Within the stated range; its lower end where there is no valid report."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else the grader reported."""
    error: str | None = None
    """Why there is no valid report."""
    tampering: tuple[str, ...] = ()
    """See :data:`~agentrl.sandbox.grading.tampering.TAMPERING`."""


def check_source(source: str, what: str) -> None:
    """Raise :class:`RewardError` where trusted source is no Python: it would fail every solution.

    Args:
        what: the source is, for the message.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(source, "<grading>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{what} is no Python program: {error}") from error


async def collect(
    sandbox: Sandbox, patterns: Sequence[str], *, limits: ArtifactLimits | None = None
) -> dict[str, bytes]:
    """Return the regular files of a sandbox's work directory that match ``patterns``.

    Links, devices and :data:`HOOKS` are left out, as is what exceeds ``max_file_bytes``.

    Args:
        sandbox: the agent's, whose processes may be hostile: what they say is checked here.
        patterns: of :mod:`fnmatch`, against the path from the work directory (``src/*.py``);
            ``*`` stands for slashes too.
        limits: where a limit on files or bytes together is passed, nothing is taken: a part of a
            project grades as something that nobody made.

    Raises:
        SandboxError: infrastructure failed.
    """
    limits = limits or ArtifactLimits()
    job = {
        "max_files": limits.max_files * 16,  # patterns are matched out here
        "max_file_bytes": limits.max_file_bytes,
        "max_total_bytes": limits.max_total_bytes * 4,
    }
    result = await sandbox.run_private(_COLLECTOR, json.dumps(job).encode())
    if result.status is SandboxStatus.INFRA_ERROR:
        raise SandboxError(f"the artifacts could not be collected: {result.error}")
    files: dict[str, bytes] = {}
    for line in _lines(result.private, limits.max_files * 16 + 1):
        found = _file(line, limits)
        if found is not None and _is_wanted(found[0], patterns):
            files.setdefault(*found)
    sizes = [len(data) for data in files.values()]
    fits = len(sizes) <= limits.max_files and sum(sizes) <= limits.max_total_bytes
    return files if fits and result.private.endswith(b'{"end": true}\n') else {}


async def grade_artifacts(
    sandboxes: SandboxProvider,
    *,
    artifacts: Mapping[str, bytes],
    grader: str,
    tests: Mapping[str, bytes] | None = None,
    low: float = 0.0,
    high: float = 1.0,
    timeout_s: float,
) -> Verdict:
    """Run ``grader`` over ``artifacts`` in a fresh sandbox.

    The grader is a trusted Python program whose current directory holds both kinds of files. It
    calls ``report(score, **details)`` once, and ``run(argv, stdin=b"", timeout_s=10.0)`` for
    everything of the artifacts that is to be executed: a child that neither inherits the
    descriptor nor can read the memory of the grader. What it imports itself, it trusts.

    Args:
        sandboxes: one is taken.
        artifacts: relative path to content; untrusted.
        grader: source of the program.
        tests: the grader's own files; written last, so that they replace artifacts of that name.
        low, high: the range of a score; outside of it a report is refused.
        timeout_s: for the grader.

    Returns:
        The verdict. Where the grader raised, hung or was ended, the artifacts made it do so, as
        far as anyone can tell: they score ``low``, with ``broke_grader`` in ``tampering``. A share
        of 1 of that metric says that it is the grader which is broken.

    Raises:
        SandboxError: infrastructure failed; nothing is known about the artifacts.
        RewardError: the grader is no Python, a file of its own cannot be written, or it reported
            outside of the range.
    """
    check_source(grader, "the grader")
    nonce = secrets.token_hex(16)
    sandbox = await sandboxes.acquire()
    try:
        try:
            for path, data in _beside(artifacts, tests or {}).items():
                await sandbox.write(path, data)
        except ToolError as error:  # the artifacts' fault: they must not leave their baseline by it
            return Verdict(
                score=low,
                error=f"the artifacts cannot be written: {error}"[:300],
                tampering=("broke_grader",),
            )
        try:
            for path, data in (tests or {}).items():
                await sandbox.write(path, data)
        except ToolError as error:
            raise RewardError(f"a file of the grader's cannot be written: {error}") from error
        payload = json.dumps({"nonce": nonce, "grader": grader}).encode()
        result = await sandbox.run_private(_GRADER, payload, timeout_s=timeout_s)
    finally:
        await sandbox.close()
    return _verdict(result, nonce, low=low, high=high)


def _beside(artifacts: Mapping[str, bytes], tests: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the artifacts that take no place of the grader's: no file where it has a folder."""
    own = {str(PurePosixPath(path)) for path in tests}
    folders = {str(folder) for path in own for folder in PurePosixPath(path).parents}
    return {
        path: data
        for path, data in artifacts.items()
        if _is_plain(path)
        and path not in own | folders
        and own.isdisjoint(map(str, PurePosixPath(path).parents))
    }


def _lines(private: bytes, most: int) -> list[bytes]:
    """Return at most so many lines: a box that lies must not cost the event loop seconds."""
    return [line for line in private.split(b"\n", most)[:most] if line]


def _verdict(result: ExecResult, nonce: str, *, low: float, high: float) -> Verdict:
    if result.status is SandboxStatus.INFRA_ERROR:
        raise SandboxError(f"the sandbox of the grader failed: {result.error}")
    reports, forged = _reports(result.private, nonce)
    tampering = ("forged_report",) if forged else ()
    if result.status is not SandboxStatus.OK or len(reports) != 1:
        error = (
            f"the grader ended with {result.status}: {_last_line(result.error)}"
            if result.status is not SandboxStatus.OK
            else f"the grader made {len(reports)} reports instead of one"
        )
        return Verdict(score=low, error=error, tampering=(*tampering, "broke_grader"))
    score = check_reward(reports[0]["score"], where="the grader's report")
    if not low <= score <= high:
        raise RewardError(
            f"the grader reported {score:g}, outside of the range from {low:g} to {high:g}"
        )
    return Verdict(score=score, details=reports[0]["details"], tampering=tampering)


def _reports(private: bytes, nonce: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the valid reports, and whether something else was written beside them."""
    reports: list[dict[str, Any]] = []
    forged = False
    for line in _lines(private, _MAX_REPORT_LINES):
        try:
            said = json.loads(line)
            known = secrets.compare_digest(str(said["nonce"]), nonce)
        except (ValueError, KeyError, TypeError, RecursionError):
            known, said = False, {}
        if known:
            reports.append(said)
        forged |= not known
    return reports, forged


def _file(line: bytes, limits: ArtifactLimits) -> tuple[str, bytes] | None:
    """Read one line of a box that may lie; None if it is no file to take."""
    try:
        said = json.loads(line)
        path, content = said["path"], said["data"]
        if type(path) is not str or type(content) is not str:
            return None
        data = base64.b64decode(content, validate=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (path, data) if _is_plain(path) and len(data) <= limits.max_file_bytes else None


def _is_plain(path: str) -> bool:
    """Whether a path stays below its directory and names no hook."""
    parts = PurePosixPath(path).parts
    return (
        bool(parts)
        and _NAME.fullmatch(path) is not None
        and str(PurePosixPath(path)) == path
        and "\\" not in path
        and not path.startswith(("/", "~"))
        and not {"..", "."} & set(parts)
        and not any(fnmatch.fnmatchcase(part, hook) for part in parts for hook in HOOKS)
    )


def why_nothing_matches(pattern: str) -> str | None:
    """Return why :func:`collect` can never find a file for a pattern; None if it may."""
    parts = pattern.split("/")
    if pattern.startswith(("/", "~")) or "\\" in pattern or {"..", ".", ""} & set(parts):
        return "it must be relative to the workspace, without '.', '..' and a slash at its end"
    hooks = [part for part in parts for hook in HOOKS if fnmatch.fnmatchcase(part, hook)]
    return f"{hooks[0]!r} changes how tests run and is never taken" if hooks else None


def _is_wanted(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _last_line(traceback: str | None) -> str:
    lines = [line for line in (traceback or "").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
