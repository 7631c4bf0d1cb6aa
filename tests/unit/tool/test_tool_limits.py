"""Limits of a tool: the same from a file, from code, and from a server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ToolSpecError
from agentrl.tool import ToolLimits
from agentrl.tool.file_schema import spec_file_schema
from agentrl.tool.section import Section
from agentrl.tool.spec import LIMIT_RANGES, load_spec, read_limits
from agentrl.tool.yaml_io import load_document

WRONG: list[tuple[str, Any]] = [
    ("timeout_s", 0),
    ("timeout_s", -1.0),
    ("timeout_s", math.nan),
    ("timeout_s", math.inf),
    ("timeout_s", 1e308),
    ("timeout_s", "5"),
    ("timeout_s", True),
    ("max_calls", 0),
    ("max_calls", 1.5),
    ("concurrency", 0),
    ("concurrency", 2**40),
    ("retries", -1),
    ("retries", 10**6),
    ("max_output_tokens", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_code_cannot_set_what_is_no_limit(name: str, value: Any):
    with pytest.raises(ToolSpecError, match=rf"limits\.{name} must be"):
        ToolLimits(**{name: value})


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_file_is_told_where_it_stands(tmp_path: Path, name: str, value: Any):
    written = {math.nan: ".nan", math.inf: ".inf", 1e308: "1.0e+308"}.get(value) or json.dumps(
        value
    )
    path = tmp_path / "tool.yaml"
    path.write_text(
        "name: a\ndescription: b\nparameters: {type: object}\npython: ./a.py:A\nidempotent: true\n"
        f"limits:\n  {name}: {written}\n"
    )
    with pytest.raises(ToolSpecError, match=rf"tool\.yaml:7:\d+: limits\.{name}"):
        load_spec(path)


def test_a_server_cannot_set_what_is_no_limit(tmp_path: Path):
    path = tmp_path / "tool.yaml"
    path.write_text("server: {url: http://127.0.0.1}\n")
    with pytest.raises(ToolSpecError, match=r"tool\.yaml:1:1: limits\.timeout_s"):
        read_limits(Section(load_document(path)), {"timeout_s": math.nan})


@pytest.mark.parametrize("name", LIMIT_RANGES)
def test_both_ends_of_a_range_are_taken_and_are_what_editors_are_told(name: str):
    least, most = LIMIT_RANGES[name]
    for value in (least, most):
        given: dict[str, Any] = {name: value}
        assert getattr(ToolLimits(**given), name) == value
    told = spec_file_schema()["properties"]["limits"]["properties"][name]
    assert (told["minimum"], told["maximum"]) == (least, most)
