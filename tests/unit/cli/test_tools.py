"""`agentrl tools call` with several calls, which share one trajectory."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrl.cli.tools import command
from agentrl.errors import ToolError

EXAMPLE = Path(__file__).parents[3] / "examples" / "tools" / "README.md"


def test_the_session_of_the_example_runs_as_it_is_printed():
    block = EXAMPLE.read_text().split("```console\n")[1].split("```")[0]
    typed, _, printed = block.removeprefix("$ ").partition("'\nsrc/")
    words = shlex.split(f"{typed}'".replace("\\\n", " "))
    assert words[:2] == ["agentrl", "tools"]
    done = CliRunner().invoke(command, words[2:])
    assert done.exit_code == 0, done.output
    assert done.output == f"src/{printed}"


def test_a_call_that_fails_does_not_end_the_others_but_the_exit_code_tells():
    calls = ["calculator", '{"expression": "1 +"}', "calculator", '{"expression": "6 * 7"}']
    done = CliRunner().invoke(command, ["call", *calls])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "42"
    assert "status: error" in done.stderr


def test_a_tool_without_its_arguments_is_told():
    done = CliRunner().invoke(command, ["call", "calculator", "{}", "python"])
    assert isinstance(done.exception, ToolError)
    assert "pairs" in str(done.exception)


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": 1, "a": 2}'])
def test_arguments_that_are_no_object_are_told(arguments: str):
    done = CliRunner().invoke(command, ["call", "calculator", "{}", "calculator", arguments])
    assert isinstance(done.exception, ToolError)
