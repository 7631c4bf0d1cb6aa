"""Which files of code settings name, and whether they are what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.code_files import has_same_content, named_files, stamped
from agentrl.config.load import load


def test_every_file_that_settings_name_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("env.py", "other.py", "part.py", "tool.yaml"):
        Path(name).write_text("x")
    config = load(
        [
            "env.mix=[{id: './env.py:A'}, {id: calculator, name: 'C'}, {id: './other.py:B'}]",
            "reward.path='./part.py:grade'",
            "tools.specs.python=./tool.yaml",
            "data.curriculum.id='./none.py:Gone'",
            "model.path=some/model.py",
        ]
    )
    assert named_files(config) == {
        "env.mix[0].id": tmp_path / "env.py",
        "env.mix[2].id": tmp_path / "other.py",
        "reward.path": tmp_path / "part.py",
        "tools.specs.python": tmp_path / "tool.yaml",
    }


@pytest.mark.parametrize(
    "text", ["~nobody_of_that_name/env.py:A", "a\\0.py:A", "x" * 300 + ".py:A"]
)
def test_text_that_is_no_path_names_no_file(text: str) -> None:
    config = load(["env.id=any"])
    config.env.kwargs = {"prompt": text}
    assert named_files(config) == {}


def test_a_stamp_tells_content_and_place_apart(tmp_path: Path) -> None:
    for name, content in {"a": "1", "b": "1", "c": "2"}.items():
        (tmp_path / name).write_text(content)
    a, b, c = (stamped({"env.id": tmp_path / name})["env.id"] for name in "abc")
    assert a != b and has_same_content(a, b) and not has_same_content(a, c)
    assert a.partition(" ")[2] == str(tmp_path / "a")
    assert stamped({"env.id": tmp_path / "gone"}) == {}
