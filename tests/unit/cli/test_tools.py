"""`agentrl tools call` with several calls, which share one trajectory."""

from __future__ import annotations

import json
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


def test_one_tool_of_several_is_named_after_its_spec(tmp_path: Path):
    (tmp_path / "impl.py").write_text(
        "from agentrl.tool import tool\n@tool(description='d')\ndef f(a: int) -> int:\n  return a\n"
    )
    spec = tmp_path / "f.yaml"
    spec.write_text("python: ./impl.py:f\n")
    done = CliRunner().invoke(command, ["call", f"{spec}#f", '{"a": 1}', str(spec), '{"a": 2}'])
    assert (done.exit_code, done.output) == (0, "1\n2\n")
    checked = CliRunner().invoke(command, ["check", str(spec), "calculator"])
    names = [schema["function"]["name"] for schema in json.loads(checked.output)]
    assert names == ["f", "calculator"]


def test_the_schema_of_spec_files_is_printed():
    done = CliRunner().invoke(command, ["schema"])
    assert {"http", "mcp", "python", "server"} <= set(json.loads(done.output)["properties"])


def test_a_spec_of_several_tools_is_never_called_without_a_name(tmp_path: Path):
    spec = tmp_path / "clock.yaml"
    spec.write_text("mcp: {command: [mcp-server-time]}\n")
    for written in (str(spec), f"{spec}#get_time"):
        done = CliRunner().invoke(command, ["call", written, '{"timezone": "UTC"}'])
        assert isinstance(done.exception, ToolError)
        assert f"{spec}#NAME with one of: get_current_time, convert_time" in str(done.exception)
