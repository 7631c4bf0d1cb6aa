"""Paths of tool arguments: list A11 and its kin are refused, plain ones are not."""

from __future__ import annotations

import pytest
from agentrl_tools.paths import check_file, check_path
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ToolError

ESCAPES = [
    "../../x",
    "a/../../x",
    "..",
    "/etc/passwd",
    "/",
    "/boxes/x",
    "/box/../etc/passwd",
    "//etc/passwd",
    "%2e%2e/x",
    "%2E%2e%2fx",
    "a%2fb",
    "a%00b",
    "a\0b",
    "a\nb",
    "~",
    "~root/x",
    "..\\x",
    "a\\b",
    "a\u2215b",
    "\uff0e\uff0e/x",
    "\u2025/x",
    "a\uff0fb",
    "a\u2044b",
    "a\u202eb",
    "a\ud800b",
    "x" * 5000,
]


@pytest.mark.parametrize("path", ESCAPES, ids=lambda path: ascii(path)[:40])
def test_what_leads_out_or_hides_it_is_refused_in_one_short_sentence(path: str):
    with pytest.raises(ToolError) as caught:
        check_file(path)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("a.txt", "a.txt"),
        ("src/./main.py", "src/main.py"),
        ("/box/src/main.py", "src/main.py"),
        ("src//main.py", "src/main.py"),
        (".gitignore", ".gitignore"),
        ("...", "..."),
        ("a..b", "a..b"),
        ("100% sure.txt", "100% sure.txt"),
        ("naïve/日本語.md", "naïve/日本語.md"),
        ("backup~", "backup~"),
    ],
)
def test_plain_paths_are_taken(path: str, inside: str):
    assert check_file(path) == inside


@pytest.mark.parametrize("path", ["", ".", "/box", "/box/", "src/"])
def test_a_folder_is_no_file(path: str):
    with pytest.raises(ToolError, match="folder"):
        check_file(path)


@given(st.text(alphabet=st.sampled_from("./~%2eE5cf\\ab\0\u2215\uff0e\u2024 "), max_size=12))
def test_whatever_is_taken_stays_inside(path: str):
    try:
        inside = check_path(path)
    except ToolError:
        return
    assert not inside.startswith(("/", "~"))
    assert ".." not in inside.split("/")
    assert not set(inside) & set("\\\0\u2215\uff0e")
