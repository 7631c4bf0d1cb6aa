from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.telemetry.files import atomic_write, filling


def test_replaces_and_creates_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    atomic_write(path, "one")
    atomic_write(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["b.txt"]


def test_failure_leaves_the_old_content_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.txt"
    atomic_write(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["b.txt"]


def test_honours_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "x", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_folder_is_filled_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def fill(text: str, *, fails: bool = False) -> None:
        with filling(folder, last=("config.json",)) as writing:
            (writing / "config.json").write_text(text)
            assert not (folder / "config.json").exists()
            (writing / "weights").write_text(text)
            if fails:
                raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fill("first", fails=True)
    assert not folder.exists()  # so that it can be filled again
    folder.mkdir()
    with pytest.raises(OSError, match="full"):
        fill("again", fails=True)
    assert list(folder.iterdir()) == []
    fill("second")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "config.json": "second", "weights": "second",
    }  # fmt: skip
