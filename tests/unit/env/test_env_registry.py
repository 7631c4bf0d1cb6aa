from __future__ import annotations

import sys
from pathlib import Path

import pytest
from misbehaving import Coroutines, Obedient

from agentrl.env.base import Env
from agentrl.env.registry import env_class, env_registry, make_env, register_env, runs_in_process
from agentrl.errors import ConfigError, EnvError, RegistryError

FILE = Path(__file__).with_name("misbehaving.py")


def test_packs_are_found_by_id() -> None:
    assert {"guess_number", "calculator", "code_sandbox"} <= set(env_registry.names())
    assert env_class("guess_number").__name__ == "GuessNumber"


def test_an_unknown_id_lists_close_matches_and_how_to_register() -> None:
    with pytest.raises(RegistryError, match="did you mean 'guess_number'.*file.py:Name"):
        make_env("gues_number")


def test_the_decorator_registers_and_refuses_a_second_of_the_name() -> None:
    @register_env("test-decorated")
    class Mine(Obedient):
        pass

    assert env_class("test-decorated") is Mine
    with pytest.raises(RegistryError, match="already registered"):
        register_env("test-decorated")(Obedient)


def test_import_path_and_file_path_lead_to_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = env_class(f"{FILE}:Obedient")
    assert by_file is env_class(f"{FILE}:Obedient")
    monkeypatch.chdir(FILE.parent)
    assert env_class("./misbehaving.py:Obedient") is by_file
    assert env_class("misbehaving:Obedient") is Obedient


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(RegistryError, match="no environment"):
        env_class("pathlib:Path")
    with pytest.raises(RegistryError, match="has no 'Obedien'; did you mean Obedient"):
        env_class(f"{FILE}:Obedien")
    with pytest.raises(RegistryError, match="no file"):
        env_class("./nowhere.py:Env")


def test_a_file_that_fails_on_import_names_the_error(tmp_path: Path) -> None:
    source = tmp_path / "broken.py"
    source.write_text("import no_such_package_at_all\n")
    with pytest.raises(RegistryError, match="no_such_package_at_all"):
        env_class(f"{source}:Env")
    assert not any(name.startswith("agentrl_file_broken") for name in sys.modules)


def test_arguments_are_checked_and_passed() -> None:
    env = make_env(f"{FILE}:Obedient", {"greeting": "hey"})
    assert isinstance(env, Env) and env.reset()[0] == "hey"
    with pytest.raises(ConfigError, match="env.kwargs.greting: .*'greeting'"):
        make_env(f"{FILE}:Obedient", {"greting": "hey"})
    with pytest.raises(ConfigError, match="env.kwargs.greeting: .*str, got 5"):
        make_env(f"{FILE}:Obedient", {"greeting": 5})


def test_a_constructor_that_raises_is_an_env_error() -> None:
    with pytest.raises(EnvError, match="raised ValueError: no such database"):
        make_env(f"{FILE}:Obedient", {"fail": True})


@pytest.mark.parametrize(
    ("env_id", "process", "expected"),
    [
        ("guess_number", None, False),
        ("guess_number", True, True),
        (f"{FILE}:Obedient", None, False),
        (f"{FILE}:Isolated", None, True),
        (f"{FILE}:Isolated", False, False),
        (f"{FILE}:Returning", None, True),
        (f"{FILE}:Coroutines", None, False),
    ],
)
def test_where_an_environment_runs(env_id: str, process: bool | None, expected: bool) -> None:
    assert runs_in_process(env_id, process) is expected
    assert Coroutines.__name__ == "Coroutines"


def test_sys_exit_is_an_error_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RegistryError, match="failed with SystemExit"):
        env_class(f"{tmp_path}/leaves.py:Env")

    @register_env("test-leaving")
    class Leaving(Obedient):
        def __init__(self) -> None:
            sys.exit(0)

    with pytest.raises(EnvError, match="'test-leaving': the constructor raised SystemExit"):
        make_env("test-leaving")


def test_a_file_that_wants_the_one_beside_it_is_told_how(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 1\n")
    (tmp_path / "wants.py").write_text("import beside\n")
    with pytest.raises(RegistryError, match=f"found with PYTHONPATH={tmp_path}"):
        env_class(f"{tmp_path}/wants.py:Env")
    (tmp_path / "wants.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(RegistryError, match="No module named 'not_installed_anywhere'$"):
        env_class(f"{tmp_path}/wants.py:Env")


def test_a_file_without_a_name_is_told_to_give_one() -> None:
    with pytest.raises(RegistryError, match="did you mean './env.py:NAME'"):
        env_class("./env.py")
