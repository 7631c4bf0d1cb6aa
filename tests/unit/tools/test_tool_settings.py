"""Limits of tools that would be none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agentrl_tools.bash.tool import BashTool
from agentrl_tools.executions import shorten
from agentrl_tools.http_fetch.tool import HttpFetch
from agentrl_tools.search.tool import Search
from agentrl_tools.search_files.tool import SearchFiles
from agentrl_tools.view_file.tool import ViewFile

from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("tool", "setting", "value"),
    [
        (BashTool, "max_chars", 0),
        (HttpFetch, "max_bytes", 0),
        (HttpFetch, "max_chars", -1),
        (HttpFetch, "wall_s", float("nan")),
        (Search, "max_results", -1),
        (Search, "snippet_words", 0),
        (SearchFiles, "max_files", 0),
        (SearchFiles, "max_results", 0),
        (SearchFiles, "wall_s", 0.0),
        (SearchFiles, "wall_s", float("inf")),
        (ViewFile, "max_lines", 0),
        (ViewFile, "max_line_chars", -1),
    ],
)
def test_a_limit_that_is_none_is_refused(tool: Callable[..., Any], setting: str, value: float):
    with pytest.raises(ConfigError, match=setting):
        tool(**{setting: value})


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_text_is_shortened_to_what_was_asked_for(most: int):
    head, note, tail = shorten("x" * 100, most).split("\n")
    assert len(head) + len(tail) <= most and f"[{100 - len(head + tail)} characters" in note
