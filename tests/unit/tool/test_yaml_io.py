"""YAML written by somebody else: refused with line and column, never executed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ToolSpecError
from agentrl.tool.spec import load_specs
from agentrl.tool.yaml_io import load_document


def refused(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "tool.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ToolSpecError) as caught:
        load_document(path)
    return str(caught.value)


def test_a_plain_mapping_is_returned(tmp_path: Path):
    path = tmp_path / "tool.yaml"
    path.write_text("a: 1\nb: {c: [x, true]}\n")
    assert load_document(path).value == {"a": 1, "b": {"c": ["x", True]}}


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        ("a: [1,\nb: }", ":2:4", "expected"),
        ("a:\n\tb: 1", ":2:1", "tab"),
        ("", ":1:1", "got nothing"),
        ("# only a comment\n", ":1:1", "got nothing"),
        ("- a\n- b\n", ":1:1", "got list"),
        ("just text", ":1:1", "got str"),
        (b"\xef\xbb\xbfa: 1", ":1:1", "byte order mark"),
        ("a: 1".encode("utf-16"), ":1:1", "byte order mark"),
        (b"ok: 1\na: \xff", ":2", "UTF-8"),
        ("a: 1\nb: 2\na: 3\n", ":3:1", "'a' is given twice"),
        ("x: {b: 1, b: 2}", ":1:11", "'b' is given twice"),
        ("1: a\n", ":1:1", "no text"),
        ("a: 1\n---\nb: 2\n", ":2:1", "one document"),
        ("ok: 1\na: \x00", ":2:4", "is not allowed"),
        ("a: [1, " + "9" * 5000 + "]", ":1:8", "digits"),
    ],
)
def test_malformed_files_are_refused_with_their_place(
    tmp_path: Path, content: str | bytes, where: str, what: str
):
    message = refused(tmp_path, content)
    assert f"tool.yaml{where}" in message
    assert what in message


@pytest.mark.parametrize(
    "content",
    [
        "a: !!python/object/apply:os.system ['touch {0}']",
        "a: !!python/name:os.system ''",
        "!!python/object/new:type {{}}",
        "a: !custom x",
        "a: !!str 1",
        "a: !!binary aGk=",
        "%TAG !y! tag:yaml.org,2002:python/\n---\na: !y!name:os.system ''",
    ],
)
def test_tags_are_refused_and_run_nothing(tmp_path: Path, content: str):
    witness = tmp_path / "witness"
    assert "tag" in refused(tmp_path, content.format(witness))
    assert not witness.exists()


def test_an_alias_bomb_is_refused_before_it_expands(tmp_path: Path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "aliases are refused" in refused(tmp_path, "\n".join(lines))


def test_size_nodes_and_depth_are_bounded(tmp_path: Path):
    assert "bytes" in refused(tmp_path, "a: " + "x" * 300_000)
    assert "nodes" in refused(tmp_path, "a: [" + "1," * 20_000 + "1]")
    assert "levels" in refused(tmp_path, "a: " + "[" * 100 + "]" * 100)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ToolSpecError, match="nowhere.yaml"):
        load_document(tmp_path / "nowhere.yaml")


GOOD = b"""name: greet
description: Greets.
parameters: {type: object, properties: {who: {type: string, enum: ['a', "b"]}}, required: [who]}
python: ./impl.py:greet
limits: {timeout_s: 5.5, retries: 0}  # a comment
"""


@settings(max_examples=5_000 if os.environ.get("AGENTRL_SOAK") else 200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(max_size=3)), max_size=4))
def test_a_mangled_file_is_read_or_refused_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]]
):
    content = bytearray(GOOD)
    for at, new in edits:
        content[at : at + 1] = new
    path = tmp_path_factory.getbasetemp() / "mangled.yaml"
    path.write_bytes(content)
    try:
        load_specs(path)
    except ToolSpecError as error:
        assert re.match(rf"{re.escape(str(path))}:[1-9][0-9]*:[1-9][0-9]*: .", str(error))


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.timeout(10)  # opening a pipe waits for somebody who writes
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (put_pipe, "no plain file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "no plain file"),
        (lambda path: path.symlink_to(path), "no path of a file"),
        (lambda path: None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_file_is_told_and_never_waited_for(
    tmp_path: Path, put: Callable[[Path], object], said: str
):
    put(tmp_path / "tool.yaml")
    with pytest.raises(ToolSpecError, match=said):
        load_specs(tmp_path / "tool.yaml")


@pytest.mark.parametrize("path", ["a\0b.yaml", "~nosuchuser/a.yaml", "a" * 5000 + ".yaml"])
def test_a_path_that_is_none_is_told_in_a_few_words(path: str):
    with pytest.raises(ToolSpecError) as caught:
        load_specs(Path(path))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("key", ["name", "python", "description"])
def test_a_message_does_not_repeat_a_long_value(tmp_path: Path, key: str):
    values = {"name": "a", "description": "b", "python": "./a.py:A", key: "x" * 100_000}
    path = tmp_path / "tool.yaml"
    path.write_text(json.dumps(values | {"parameters": 5}))
    with pytest.raises(ToolSpecError) as caught:
        load_specs(path)
    assert len(str(caught.value)) < 2000
