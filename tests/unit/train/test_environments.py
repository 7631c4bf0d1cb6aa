"""Environments of a run, made from their entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.env.config import EnvConfig, MixEntry
from agentrl.errors import ConfigError, ToolSpecError
from agentrl.tool.config import ToolsConfig
from agentrl.train.environments import (
    code_files,
    make_environments,
    need_sandboxes,
    refuse_idle_specs,
)

ECHO = "agentrl.testing:EchoEnv"
PYTHON = {"tools": ["python"]}


def test_one_environment_twice_with_other_arguments_and_tools() -> None:
    mix = [MixEntry(id=ECHO, name="plain"), MixEntry(id=ECHO, name="coder", kwargs=PYTHON)]
    plain, coder = make_environments(EnvConfig(mix=mix))
    assert (plain.name, coder.name) == ("plain", "coder")
    assert plain.toolbox.schemas == []
    assert list(coder.toolbox.bindings) == ["python"]
    assert plain.env is not coder.env
    assert not need_sandboxes([plain])


def test_a_tool_is_replaced_wherever_it_occurs(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    mix = [MixEntry(id=ECHO, name="plain"), MixEntry(id=ECHO, name="coder", kwargs=PYTHON)]
    with pytest.raises(ToolSpecError, match="none.yaml"):
        make_environments(EnvConfig(mix=mix), ToolsConfig(specs={"python": missing}))


def test_a_spec_for_a_tool_that_no_environment_has_is_refused_with_the_nearest() -> None:
    mix = [MixEntry(id=ECHO, name="plain"), MixEntry(id=ECHO, name="coder", kwargs=PYTHON)]
    made = make_environments(EnvConfig(mix=mix))
    with pytest.raises(
        ConfigError,
        match=r"tools.specs.pyhton='mine.yaml': .*in plain, coder; did you mean 'python'\? known: ",
    ):
        refuse_idle_specs(made, {"pyhton": "mine.yaml"})
    with pytest.raises(ConfigError, match="known: none"):
        refuse_idle_specs(made[:1], {"python": "mine.yaml"})
    refuse_idle_specs(made, {"python": "mine.yaml"})


def test_a_wrong_argument_is_named_with_its_entry() -> None:
    mix = [MixEntry(id=ECHO), MixEntry(id=ECHO, name="b", kwargs={"num_turn": 2})]
    with pytest.raises(ConfigError, match=r"env.mix\[1\].kwargs.num_turn: .*'num_turns'"):
        make_environments(EnvConfig(mix=mix))
    with pytest.raises(ConfigError, match=r"env.kwargs.num_turn: "):
        make_environments(EnvConfig(id=ECHO, kwargs={"num_turn": 2}))


def test_one_environment_that_needs_sandboxes_is_enough() -> None:
    mix = [MixEntry(id=ECHO), MixEntry(id="code_sandbox")]
    assert need_sandboxes(make_environments(EnvConfig(mix=mix)))


TOOL = """
name: {name}
description: Adds.
parameters: {{type: object, properties: {{a: {{type: integer}}}}, required: [a]}}
python: ./code.py:add
"""


def test_files_of_code_are_those_that_paths_and_import_paths_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code.py").write_text("def add(a: int) -> int:\n    return a + 1\n")
    for name in ("mine", "python"):
        (tmp_path / f"{name}.yaml").write_text(TOOL.format(name=name))
    (tmp_path / "imported_env.py").write_text(
        "from agentrl.testing import EchoEnv\n\nclass Own(EchoEnv):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    specs = {"python": str(tmp_path / "python.yaml")}
    tools = {"tools": ["calculator", "python", str(tmp_path / "mine.yaml")]}
    mix = [
        MixEntry(id="imported_env:Own", name="own"),
        MixEntry(id=ECHO, name="coder", kwargs=tools),
        MixEntry(id="qa"),
    ]
    made = make_environments(EnvConfig(mix=mix), ToolsConfig(specs=specs))
    assert code_files(made, specs) == {
        "env.mix[0].id": tmp_path / "imported_env.py",
        "the tool mine of coder": tmp_path / "mine.yaml",
        "the tool mine of coder (python)": tmp_path / "code.py",
        "the tool python of coder": tmp_path / "python.yaml",
        "the tool python of coder (python)": tmp_path / "code.py",
    }
