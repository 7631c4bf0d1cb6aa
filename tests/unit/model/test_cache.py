"""The cache holds whole directories or none."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from agentrl.errors import ModelError
from agentrl.model.cache import cache_root, file_sha256, make_once


def test_the_variable_chooses_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("AGENTRL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "agentrl"


def test_a_directory_is_made_once(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    assert make_once(target, lambda folder: (folder / "a").touch())
    assert not make_once(target, lambda folder: pytest.fail("made twice"))
    assert [entry.name for entry in target.parent.iterdir()] == ["target"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        make_once(tmp_path / "cache" / "target", fail)
    assert not list((tmp_path / "cache").iterdir())


def test_the_faster_of_two_processes_wins(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def slow(folder: Path) -> None:
        (folder / "who").write_text("slow")
        target.mkdir()
        (target / "who").write_text("fast")

    assert make_once(target, slow)
    assert (target / "who").read_text() == "fast"
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_a_place_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="set AGENTRL_CACHE"):
        make_once(tmp_path / "file" / "target", lambda folder: None)


def test_digests_are_those_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert file_sha256(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()
