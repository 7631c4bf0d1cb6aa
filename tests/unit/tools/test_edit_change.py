"""What an edit makes of a text."""

from __future__ import annotations

import pytest
from agentrl_tools.edit_file.change import insert, replace
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ToolError

TEXT = "def f():\n    return 1\n\ndef g():\n    return 1\n"
lines = st.lists(st.text(alphabet="ab ", max_size=4), max_size=8)


def test_a_single_place_is_replaced_and_told():
    change = replace(TEXT, "def g():\n    return 1", "def g():\n    return 2", "f.py")
    assert change.text == TEXT[:-2] + "2\n"
    assert (change.first_line, change.num_lines) == (4, 2)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("return 1", "x", "more than once in f.py (at lines 2, 5)"),
        ("return 3", "x", "not found in f.py; view the file"),
        ("def f():\n  return 1", "x", "line 1 is like its first line"),
        ("", "x", "empty"),
        ("return 1", "return 1", "nothing would change"),
    ],
)
def test_any_other_replacement_says_what_to_do(old: str, new: str, told: str):
    with pytest.raises(ToolError) as caught:
        replace(TEXT, old, new, "f.py")
    assert told in str(caught.value)


def test_other_line_ends_are_told():
    with pytest.raises(ToolError, match="CR LF"):
        replace("a\r\nb\r\n", "a\nb", "c", "f")


def test_places_that_overlap_are_more_than_one():
    with pytest.raises(ToolError, match="more than once"):
        replace("aaa", "aa", "b", "f")


@given(lines, lines, st.text(alphabet="xy\n", min_size=1, max_size=5))
def test_a_replacement_changes_nothing_else(before: list[str], after: list[str], new: str):
    head, tail = "\n".join(before), "\n".join(after)
    change = replace(f"{head}<old>{tail}", "<old>", new, "f")
    assert change.text == f"{head}{new}{tail}"
    assert change.text.split("\n")[change.first_line - 1].startswith(before[-1] if before else "")


@given(lines, st.data(), st.lists(st.text(alphabet="xy", min_size=1), min_size=1, max_size=3))
def test_an_insertion_comes_right_after_its_line(old: list[str], data, new: list[str]):
    text = "".join(f"{line}\n" for line in old)
    place = data.draw(st.integers(0, len(old)))
    change = insert(text, place, "\n".join(new), "f")
    assert change.text.splitlines() == [*old[:place], *new, *old[place:]]
    assert (change.first_line, change.num_lines) == (place + 1, len(new))


@pytest.mark.parametrize(
    ("text", "line", "new", "expected"),
    [
        ("a", 1, "b", "a\nb\n"),
        ("a", 0, "b", "b\na"),
        ("a\x0cb\n", 1, "c", "a\x0cb\nc\n"),
        ("", 0, "b", "b\n"),
        ("a\r\nb\r\n", 1, "x", "a\r\nx\r\nb\r\n"),
        ("a\n", 0, "x\n", "x\na\n"),
        ("a\r\nb", 2, "c", "a\r\nb\r\nc\r\n"),
        ("a\r\nb", 1, "c", "a\r\nc\r\nb"),
    ],
)
def test_line_ends_stay_as_they_are(text: str, line: int, new: str, expected: str):
    assert insert(text, line, new, "f").text == expected


@pytest.mark.parametrize(("line", "new"), [(7, "x"), (1, "")])
def test_a_line_that_is_not_there_is_refused(line: int, new: str):
    with pytest.raises(ToolError):
        insert("a\n", line, new, "f")
