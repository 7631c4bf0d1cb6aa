"""Tool specifications, from YAML to something that can be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import RegistryError, ToolSpecError
from agentrl.tool.binding import Toolbox, bind
from agentrl.tool.runners.base import Allow
from agentrl.tool.spec import find_spec, load_spec, tool_registry

GOOD = """
name: greet
description: Greets.
parameters: {type: object, properties: {who: {type: string}}, required: [who]}
python: ./impl.py:greet
"""


def write(
    tmp_path: Path, yaml: str, impl: str = "def greet(who):\n    return 'hi ' + who\n"
) -> Path:
    (tmp_path / "impl.py").write_text(impl)
    path = tmp_path / "greet.yaml"
    path.write_text(yaml)
    return path


def refused(tmp_path: Path, yaml: str, impl: str = "def greet(who): ...", **kwargs) -> str:
    with pytest.raises(ToolSpecError) as caught:
        bind(load_spec(write(tmp_path, yaml, impl)), **kwargs)
    return str(caught.value)


def test_a_spec_gives_the_schema_that_templates_take(tmp_path: Path):
    spec = load_spec(write(tmp_path, GOOD))
    assert spec.schema == {
        "type": "function",
        "function": {
            "name": "greet",
            "description": "Greets.",
            "parameters": {
                "type": "object",
                "properties": {"who": {"type": "string"}},
                "required": ["who"],
            },
        },
    }
    assert bind(spec).make().call(who="you") == "hi you"


def test_kwargs_reach_the_function_and_the_class(tmp_path: Path):
    impl = "def greet(who, word='hi'):\n    return f'{word} {who}'\n"
    spec = load_spec(write(tmp_path, GOOD + "kwargs: {word: ahoy}\n", impl))
    assert bind(spec).make().call(who="you") == "ahoy you"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("name: greet", "", "name is missing"),
        ("name: greet", "name: 'no blanks'", "letters, digits"),
        ("name: greet", "name: '<|im_end|>'", "letters, digits"),
        ("description: Greets.", "description: ''", "description must be text"),
        ("description: Greets.", "description: 5", "description must be text"),
        ("parameters:", "params:", "did you mean 'parameters'"),
        ("python: ./impl.py:greet", "python: ./impl.py", "no import path"),
        ("python: ./impl.py:greet", "python: ./impl.py:gret", "did you mean greet"),
        ("python: ./impl.py:greet", "python: ./no.py:greet", "no file"),
        ("python: ./impl.py:greet", "python: ../impl.py:greet", "outside the spec's own folder"),
        ("python: ./impl.py:greet", "python: /etc/impl.py:greet", "outside the spec's own folder"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused(tmp_path: Path, old: str, new: str, what: str):
    assert what in refused(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    "target", ["os:system", "subprocess:run", "builtins:eval", "shutil:rmtree"]
)
def test_code_from_anywhere_else_is_refused(tmp_path: Path, target: str):
    message = refused(tmp_path, GOOD.replace("./impl.py:greet", target))
    assert "not allowed" in message and "tools.allow_import" in message


def test_an_allowed_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "elsewhere_pack.py").write_text("def greet(who):\n    return who\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yaml = GOOD.replace("./impl.py:greet", "elsewhere_pack:greet")
    spec = load_spec(write(tmp_path, yaml))
    with pytest.raises(ToolSpecError):
        bind(
            spec, allow=Allow(imports=["elsewhere"])
        )  # a prefix of the name is no prefix of the module
    assert bind(spec, allow=Allow(imports=["elsewhere_pack"])).make().call(who="x") == "x"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path):
    outside = tmp_path / "outside.py"
    outside.write_text("def greet(who): ...")
    inner = tmp_path / "inner"
    inner.mkdir()
    path = write(inner, GOOD.replace("impl.py", "link.py"))
    (inner / "link.py").symlink_to(outside)
    with pytest.raises(ToolSpecError, match="outside"):
        bind(load_spec(path))


@pytest.mark.parametrize(
    ("impl", "what"),
    [
        ("def greet(whom): ...", "cannot be called with the arguments"),
        ("def greet(who, more): ...", "cannot be called with the arguments"),
        ("greet = 5", "neither a function nor a class"),
        ("class greet:\n    def call(self, who): ...", "has no open, close"),
        (
            "class greet:\n    def __init__(self):\n        raise OSError('no disk')\n"
            "    def open(self, context): ...\n    def call(self, who): ...\n"
            "    def close(self): ...",
            "OSError: no disk",
        ),
        ("raise ValueError('at import')", "at import"),
        ("def greet(who: ...", "SyntaxError"),
    ],
)
def test_code_that_does_not_fit_is_refused_at_the_start(tmp_path: Path, impl: str, what: str):
    assert what in refused(tmp_path, GOOD, impl)


def test_unknown_arguments_of_a_class_are_refused(tmp_path: Path):
    impl = (
        "class greet:\n    def __init__(self, *, word='hi'): ...\n"
        "    def open(self, context): ...\n    def call(self, who): ...\n    def close(self): ..."
    )
    assert "did you mean 'word'" in refused(tmp_path, GOOD + "kwargs: {wrd: x}\n", impl)


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ("{timeout: 5}", "did you mean 'timeout_s'"),
        ("{timeout_s: soon}", "must be a number"),
        ("{timeout_s: 0}", "at least"),
        ("{timeout_s: .nan}", "at least"),
        ("{max_calls: 1.5}", "must be a number"),
        ("{max_calls: true}", "must be a number"),
        ("{max_output_tokens: 0}", "at least 1"),
        ("{retries: 2}", "idempotent"),
        ("5", "must be a mapping"),
    ],
)
def test_limits_are_checked(tmp_path: Path, limits: str, what: str):
    assert what in refused(tmp_path, GOOD + f"limits: {limits}\n")


def test_an_idempotent_tool_may_be_retried(tmp_path: Path):
    spec = load_spec(write(tmp_path, GOOD + "idempotent: true\nlimits: {retries: 2}\n"))
    assert spec.limits.retries == 2


def test_the_built_in_tools_are_found_by_name_and_a_miss_lists_them():
    assert find_spec("calculator").name == "calculator"
    assert {"calculator", "python"} <= set(tool_registry.names())
    with pytest.raises(RegistryError, match="calculator"):
        find_spec("calculato")


def test_a_toolbox_refuses_two_tools_of_one_name_and_can_replace_one(tmp_path: Path):
    path = write(tmp_path, GOOD)
    with pytest.raises(ToolSpecError, match="taken"):
        Toolbox([str(path), str(path)])
    box = Toolbox(["calculator"], replace={"calculator": str(path)})
    assert list(box.bindings) == ["greet"]
    assert box.state_keys == {"greet": "calculator"}
