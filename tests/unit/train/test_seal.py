from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import CheckpointError
from agentrl.train.seal import SEAL_NAME, refuse_damaged, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "w" / "more").mkdir(parents=True)
    (tmp_path / "w" / "model.bin").write_bytes(bytes(range(200)))
    (tmp_path / "w" / "more" / "template").write_text("{{ messages }}")
    seal(tmp_path / "w")
    return tmp_path / "w"


def test_what_is_as_it_was_written_passes(folder: Path) -> None:
    refuse_damaged(folder, what="weights")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "add", "no seal", "bad seal"])
def test_any_change_is_refused_and_named(folder: Path, damage: str) -> None:
    file = folder / "model.bin"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    named = "model.bin"
    if damage == "flip":
        file.write_bytes(bytes(data))
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "add":
        (folder / "more" / "model2.bin").touch()
        named = "more/model2.bin"
    elif damage == "no seal":
        (folder / SEAL_NAME).unlink()
        named = SEAL_NAME
    else:
        (folder / SEAL_NAME).write_text("{")
        named = SEAL_NAME
    with pytest.raises(CheckpointError, match=f"is damaged: .*{named}.*it holds weights"):
        refuse_damaged(folder, what="weights")


def test_a_folder_that_is_gone_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing: it holds weights"):
        refuse_damaged(folder.parent / "gone", what="weights")
