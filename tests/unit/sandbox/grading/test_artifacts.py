"""What the host makes of collected files and of a grader's private words."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RewardError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus
from agentrl.sandbox.grading import ArtifactLimits, Verdict, collect, grade_artifacts

OK = SandboxStatus.OK


class PrivateBox:
    """Answers a private program with what ``answer`` makes of its payload."""

    def __init__(self, answer: Callable[[dict[str, Any]], ExecResult]) -> None:
        self.answer = answer
        self.written: dict[str, bytes] = {}
        self.closed = False

    async def run_private(
        self, source: str, payload: bytes, *, timeout_s: float | None = None
    ) -> ExecResult:
        return self.answer(json.loads(payload))

    async def write(self, path: str, data: bytes) -> None:
        self.written[path] = data

    async def close(self) -> None:
        self.closed = True

    async def acquire(self, limits: SandboxLimits | None = None) -> Any:
        return self


def said(*lines: Any, status: SandboxStatus = OK, error: str | None = None) -> ExecResult:
    private = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )
    return ExecResult(status=status, private=private, error=error)


def grade(answer: Callable[[dict[str, Any]], ExecResult], **options: Any) -> Verdict:
    settings: dict[str, Any] = {"artifacts": {}, "grader": "report(1)", "timeout_s": 1.0}
    return asyncio.run(grade_artifacts(PrivateBox(answer), **settings | options))


def collected(*lines: Any, patterns: list[str] | None = None, **limits: int) -> dict[str, bytes]:
    box: Any = PrivateBox(lambda job: said(*lines))
    return asyncio.run(collect(box, patterns or ["*"], limits=ArtifactLimits(**limits)))


def file(path: Any, data: bytes = b"x") -> dict[str, Any]:
    return {"path": path, "data": base64.b64encode(data).decode()}


END = {"end": True}


def report(job: dict[str, Any], score: Any, **details: Any) -> dict[str, Any]:
    return {"nonce": job["nonce"], "score": score, "details": details}


def test_a_report_with_the_nonce_is_the_verdict() -> None:
    verdict = grade(lambda job: said(report(job, 0.5, cases=3)))
    assert verdict == Verdict(score=0.5, details={"cases": 3})


@pytest.mark.parametrize(
    "words",
    [
        lambda job: said({"nonce": "0" * 32, "score": 1.0, "details": {}}),
        lambda job: said(b"\xff\x00", {"score": 1.0}),
        lambda job: said([1], {"nonce": None, "score": 1.0}),
    ],
)
def test_words_without_the_nonce_are_no_report_and_are_counted(words: Any) -> None:
    verdict = grade(words)
    assert verdict.score == 0.0
    assert verdict.tampering == ("forged_report", "broke_grader")


def test_a_forgery_beside_a_report_does_not_change_it() -> None:
    verdict = grade(lambda job: said({"score": 1.0}, report(job, 0.25)))
    assert (verdict.score, verdict.tampering) == (0.25, ("forged_report",))


@pytest.mark.parametrize("status", [SandboxStatus.TIMEOUT, SandboxStatus.OOM, SandboxStatus.ERROR])
def test_a_grader_that_is_stopped_scores_the_least_whatever_it_said(status: SandboxStatus) -> None:
    verdict = grade(lambda job: said(report(job, 1.0), status=status, error="why"), low=-1.0)
    assert (verdict.score, verdict.tampering) == (-1.0, ("broke_grader",))
    assert "why" in (verdict.error or "")


def test_two_reports_are_none() -> None:
    assert grade(lambda job: said(report(job, 1.0), report(job, 1.0))).score == 0.0


@pytest.mark.parametrize("score", [1.5, -0.1, float("nan"), "1", None, True])
def test_a_score_outside_of_its_range_is_the_graders_fault(score: Any) -> None:
    with pytest.raises(RewardError):
        grade(lambda job: said(report(job, score)))


def test_a_grader_that_is_no_program_is_refused_before_a_sandbox_is_taken() -> None:
    with pytest.raises(RewardError, match="no Python program"):
        grade(lambda job: said(), grader="report(")


def test_a_failure_of_ours_is_not_the_artifacts() -> None:
    with pytest.raises(SandboxError, match="broken"):
        grade(lambda job: said(status=SandboxStatus.INFRA_ERROR, error="broken"))
    box: Any = PrivateBox(lambda job: said(status=SandboxStatus.INFRA_ERROR, error="broken"))
    with pytest.raises(SandboxError, match="broken"):
        asyncio.run(collect(box, ["*"]))


def test_the_graders_files_are_written_last_and_hooks_never() -> None:
    box = PrivateBox(lambda job: said(report(job, 1)))
    artifacts = {"t.py": b"theirs", "a/conftest.py": b"x", "../x": b"x", "s.py": b"s"}
    asyncio.run(
        grade_artifacts(
            box, artifacts=artifacts, tests={"t.py": b"ours"}, grader="1", timeout_s=1.0
        )
    )
    assert box.written == {"t.py": b"ours", "s.py": b"s"}
    assert box.closed


def test_files_are_chosen_by_pattern() -> None:
    files = [file("a.py"), file("src/b.py", b"\x00\xff"), file("c.txt")]
    assert collected(*files, END, patterns=["src/*", "a.*"]) == {
        "a.py": b"x",
        "src/b.py": b"\x00\xff",
    }


@pytest.mark.parametrize(
    "path",
    [
        "../a", "/etc/passwd", "a/../../b", "~/a", "a\\..\\b", "a\x00b", "a\nb", "", ".", "./..",
        "conftest.py", "x/sitecustomize.py", "lib/a.pth", ".git/config", "__pycache__/a.pyc", 5,
        "a" * 5000,
    ],
)  # fmt: skip
def test_no_path_leads_out_or_changes_how_tests_run(path: Any) -> None:
    assert collected(file(path), END) == {}


def test_nothing_is_taken_where_a_limit_cut_it() -> None:
    assert collected(file("a"), {"cut": True}) == {}
    assert collected(file("a"), file("b"), END, max_files=1) == {}
    assert collected(file("a", b"123"), file("b", b"123"), END, max_total_bytes=5) == {}
    assert collected(file("a"), {"path": "b", "data": None}, END) == {"a": b"x"}
    assert collected(file("a", b"123"), file("b"), END, max_file_bytes=2) == {"b": b"x"}


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_words_of_a_box_are_read_without_an_error(words: bytes) -> None:
    assert isinstance(collected(words, END), dict)
    assert grade(lambda job: said(words)).score == 0.0


class Disk(PrivateBox):
    """Has files and folders, and refuses one in the place of the other."""

    async def write(self, path: str, data: bytes) -> None:
        folders = {str(folder) for known in self.written for folder in PurePosixPath(known).parents}
        if path in folders or any(str(p) in self.written for p in PurePosixPath(path).parents):
            raise ToolError(f"{path!r}: Is a directory")
        await super().write(path, data)


def graded_on(disk: Disk, **files: Any) -> Verdict:
    return asyncio.run(grade_artifacts(disk, grader="report(1)", timeout_s=1.0, **files))


@pytest.mark.parametrize(
    "path", ["cases.json/a.py", "cases.json", "lib", "lib/t.py/x", "lib//t.py"]
)
def test_no_artifact_takes_the_place_of_a_file_or_folder_of_the_graders(path: str) -> None:
    disk = Disk(lambda job: said(report(job, 1.0)))
    tests = {"cases.json": b"own", "lib/t.py": b"own"}
    assert graded_on(disk, artifacts={path: b"theirs", "a.py": b"x"}, tests=tests).score == 1.0
    assert disk.written == {"a.py": b"x", **tests}


def test_artifacts_that_cannot_be_written_score_the_least_and_stay_in_the_baseline() -> None:
    disk = Disk(lambda job: said(report(job, 1.0)))
    verdict = graded_on(disk, artifacts={"a": b"1", "a/b": b"2"})
    assert (verdict.score, verdict.tampering) == (0.0, ("broke_grader",))
    assert "cannot be written" in (verdict.error or "")


def test_a_file_of_the_graders_own_that_cannot_be_written_is_the_authors_fault() -> None:
    disk = Disk(lambda job: said(report(job, 1.0)))
    with pytest.raises(RewardError, match="cannot be written"):
        graded_on(disk, artifacts={}, tests={"a": b"1", "a/b": b"2"})


@pytest.mark.parametrize("path", ["a\udcff.py", "a//b", "./a", "a/./b", "a/"])
def test_only_one_spelling_of_a_path_is_taken(path: str) -> None:
    assert collected(file(path), file("ok"), END) == {"ok": b"x"}


def test_a_flood_of_lines_is_not_read_to_its_end() -> None:
    flood = [{"score": 1.0}] * 10_001
    verdict = grade(lambda job: said(*flood, report(job, 1.0)))
    assert (verdict.score, verdict.tampering) == (0.0, ("forged_report", "broke_grader"))
    assert collected(*([1] * 100), file("late"), END, max_files=1) == {}
