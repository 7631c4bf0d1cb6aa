"""What a user types, and what comes back."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from agentrl.cli.main import cli, main
from agentrl.config.load import load, to_dict
from agentrl.errors import EnvError
from agentrl.resuming import resumed_config


class Shell:
    """Runs the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error."""
        self._monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def agentrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def test_help_lists_every_verb(agentrl: Shell) -> None:
    _, out, _ = agentrl("--help")
    for verb in (
        "train",
        "eval",
        "sft",
        "rollout",
        "export",
        "report",
        "envs",
        "tools",
        "sandbox",
        "doctor",
    ):
        assert f"  {verb}" in out


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "eval",
        "sft",
        "rollout",
        "export",
        "report",
        "mismatch",
        "envs",
        "tools",
        "sandbox",
        "doctor",
    ],
)
def test_every_verb_explains_itself(agentrl: Shell, verb: str) -> None:
    code, out, _ = agentrl(verb, "--help")
    assert code == 0
    assert "Usage: " in out and len(out) > 150


def test_an_unknown_verb_suggests_the_nearest(agentrl: Shell) -> None:
    code, _, err = agentrl("trian")
    assert code == 2
    assert "Did you mean 'train'?" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "--env NAME"),
        (["train", "--env", "code_sandbx"], "code_sandbox"),
        (["train", "--env", "code_sandbox", "env.kwargs.levl=2"], "did you mean 'level'"),
        (["train", "--env", "code_sandbox", "trainer.sed=1"], "trainer.seed"),
        (["train", "--env", "./nowhere.py:Env"], "nowhere.py"),
        (["train", "--resume", "nowhere"], "no run directory"),
        (["eval", "--env", "guess_number", "--model", "./nowhere"], "nowhere"),
        (["eval", "--model", "runs/nope"], "there is no such run"),
        (["train", "--env", "guess_number", "model.path=./nope"], "nope"),
        (["eval", "--env", "guess_number", "-n", "0"], "at least 1 sample"),
        (["eval", "--env", "guess_number", "eval.test_tasks=8"], "here write --tasks 8"),
        (["eval", "--env", "guess_number", "eval={n: 4}"], "here write -n 4"),
        (["rollout", "--env", "guess_number", "--out", "x", "eval.val_tasks=8"], "--tasks 8"),
        (["sft", "--model", "tiny", "--out", "x"], "either --env"),
        (["sft", "--env", "guess_number", "--model", "tiny", "--out", "x", "stps=1"], "steps"),
        (["sft", "--data", "a", "--model", "tiny", "--out", "x", "env.kwargs.a=1"], "with --data"),
        (["sft", "--env", "qa", "--model", "tiny", "--out", "x", "env.id=qa"], "write --env ID"),
        (["tools", "call", "calculator", "not json"], "no JSON"),
        (["tools", "call", "calculator", "{}", "--state", "[1]"], "--state is no JSON object"),
        (["tools", "call", "calculator", "[" * 100_000], "no JSON"),
        (["tools", "call", "calculator", '{"a": ' + "9" * 5000 + "}"], "no JSON"),
        (["tools", "call", "calculator", '{"a": 1, "a": 2}'], "a given twice"),
        (["eval", "--env", "guess_number", "--split", "nope"], "known: train, val, test"),
        (["eval", "--env", "guess_number", "--out", "."], "no plain file"),
        (["eval", "--env", "guess_number", "--out", f"{__file__}/x"], "is no directory"),
        (["rollout", "--env", "guess_number", "--out", "."], "no plain file"),
        (["rollout", "--env", "guess_number", "--out", f"{__file__}/a/x"], "is no directory"),
        (["rollout", "--env", "guess_number", "--out", "x" * 300], "File name too long"),
        (["rollout", "--env", "guess_number", "--out", "x", "--split", "nope"], "known: train"),
        (["sft", "--env", "guess_number", "--model", "tiny", "--out", __file__], "is a file"),
        (["export", "/", __file__], "is a file"),
        (["sandbox", "run", sys.executable], "no UTF-8 text"),
        (["tools", "check", "calculater"], "calculator"),
        (["envs", "check", "code_sandbx"], "code_sandbox"),
        (["sandbox", "check", "--backend", "locl"], "local"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    agentrl: Shell,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = agentrl(*arguments)
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


@pytest.mark.parametrize("code", [0, None, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_an_exit_within_a_verb_is_no_success(
    agentrl: Shell, monkeypatch: pytest.MonkeyPatch, code: int | None, grouped: bool
) -> None:
    async def plug_in(*arguments: object, **settings: object) -> None:
        try:
            sys.exit(code)
        except SystemExit as ending:
            raise (BaseExceptionGroup("several", [ending]) if grouped else ending) from None

    monkeypatch.setattr("agentrl.launch.train", plug_in)
    got, _, err = agentrl("train", "--env", "guess_number", "model.path=tiny")
    assert got == 2
    assert f"sys.exit({code}) was called in plug_in of {__file__}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.run_dir=other", "trainer.run_dir='other' with trainer.resume='run'"),
        ("trainer.resume=other", "trainer.resume='other' with --resume run"),
    ],
)
def test_a_resumed_run_goes_on_where_it_is(
    agentrl: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    began = load(["env.id='agentrl.testing:EchoEnv'", "trainer.run_dir=where_it_began"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(to_dict(began)))
    code, _, err = agentrl("train", "--resume", "run", setting)
    assert code == 2 and message in err
    # What the run was called when it began is no second choice; naming the same one is none either.
    assert resumed_config("run", []).trainer.resume == "run"
    assert resumed_config("run", ["trainer.run_dir=./run"]).trainer.run_dir == "./run"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "/locked/file"), "Permission denied"),
        (ExceptionGroup("many", [ExceptionGroup("in", [EnvError("no tasks")])]), "no tasks"),
    ],
)
def test_an_error_of_a_path_or_in_a_group_is_one_message(
    agentrl: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    _fail_with(monkeypatch, error)
    code, _, err = agentrl("envs", "list")
    assert code == 2 and message in err and "Traceback" not in err


@pytest.mark.parametrize(
    "error", [OSError("no path"), ExceptionGroup("many", [KeyError("ours"), EnvError("after")])]
)
def test_a_fault_of_the_program_keeps_its_traceback(
    agentrl: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _fail_with(monkeypatch, error)
    with pytest.raises(type(error)) as caught:
        agentrl("envs", "list")
    assert caught.value is error


def _fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)


def test_lists_are_json_where_scripts_read(agentrl: Shell) -> None:
    envs = json.loads(agentrl("envs", "list", "--json")[1])
    assert {"id", "summary"} == set(envs[0])
    tools = json.loads(agentrl("tools", "list", "--json")[1])
    assert {tool["name"] for tool in tools} >= {"python", "calculator"}
    report = json.loads(agentrl("sandbox", "check", "--json")[1])
    assert report["backend"] == "local" and "seccomp filter" in report["isolation"]


PRINTING = """
import os
from agentrl import Env, Task

print("imported")

class Printing(Env):
    process = False

    def tasks(self, split):
        print("asked for tasks")
        return [Task(id=split, data={"split": split, "odd": {float("nan")}})]

    def reset(self, *, seed=None, options=None):
        os.write(1, b"as a library in C would")
        return "hello", {}

    def step(self, action):
        return "", 0.0, True, False, {}
"""


@pytest.mark.parametrize("verb", ["show", "check"])
def test_with_json_nothing_else_is_on_standard_output(tmp_path: Path, verb: str) -> None:
    (tmp_path / "env.py").write_text(PRINTING)
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "envs", verb, "./env.py:Printing", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert json.loads(done.stdout)
    for said in ("imported", "asked for tasks", "as a library in C would"):
        assert said in done.stderr


def test_json_has_no_nan(agentrl: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fine_tune(*_: object, **__: object) -> dict[str, object]:
        print("not JSON")
        return {"last_loss": float("nan"), "steps": 1, "more": [float("inf"), (1.5,)]}

    monkeypatch.setattr("agentrl.sft.fine_tune", fine_tune)
    code, out, err = agentrl(
        "sft", "--env", "qa", "--model", "tiny", "--out", "never_made", "--json"
    )
    assert (code, "not JSON" in err) == (0, True)
    assert json.loads(out) == {"last_loss": None, "steps": 1, "more": [None, [1.5]]}


def test_what_to_do_after_supervised_training_plays_as_the_demonstrations_were(
    agentrl: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fine_tune(*_: object, **__: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr("agentrl.sft.fine_tune", fine_tune)
    playing = ["env.kwargs.level=2", "sandbox.id=none"]
    out = agentrl(
        "sft", "--env", "code_sandbox", "--model", "tiny", "--out", "never_made", "lr=1", *playing
    )[1]
    said = "--env code_sandbox env.kwargs.level=2 sandbox.id=none"
    assert f"agentrl eval {said} --model never_made" in out
    assert f"agentrl train {said} model.path=never_made" in out


def test_environments_are_checked_under_settings_of_theirs(agentrl: Shell, tmp_path: Path) -> None:
    hanging = PRINTING.replace('print("asked for tasks")', "__import__('threading').Event().wait()")
    (tmp_path / "env.py").write_text(hanging)
    env, setting = f"{tmp_path}/env.py:Printing", "env.tasks_timeout_s=0.1"
    for verb in ("show", "check"):
        code, out, err = agentrl("envs", verb, env, setting)
        assert code and "did not return within 0.1 s" in out + err


def test_a_tool_answers_as_it_would_answer_the_model(agentrl: Shell) -> None:
    assert agentrl("tools", "call", "calculator", '{"expression": "6 * 7"}')[:2] == (0, "42\n")
    code, out, _ = agentrl("tools", "call", "calculator", '{"expresion": "6 * 7"}')
    assert code == 1 and "expression" in out


def test_a_tool_is_handed_the_state_of_a_task(agentrl: Shell, tmp_path: Path) -> None:
    """The example of docs/tools.md, taken from the page."""
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    for language, file in (("yaml", "lookup.yaml"), ("python", "lookup.py")):
        code = page.split(f"```{language}\n# {file}\n")[1].split("```")[0]
        (tmp_path / file).write_text(code)
    line, *_ = (line for line in page.splitlines() if line.startswith("agentrl tools call"))
    arguments = [part.replace("./", f"{tmp_path}/") for part in shlex.split(line)[1:]]
    assert agentrl(*arguments)[:2] == (0, "one that acts\n")
    code, out, _ = agentrl(*arguments[:-1], '{"glossary": {}}')
    assert code == 1 and "no entry for 'agent'" in out


def test_repeated_findings_are_shown_once(agentrl: Shell, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(LYING)
    code, out, _ = agentrl("envs", "check", f"{tmp_path}/env.py:Lying")
    assert code == 1 and out.count("opens with user 'hi'") == 1 and "(and 2 more like it)" in out
    rows = json.loads(agentrl("envs", "check", f"{tmp_path}/env.py:Lying", "--json")[1])
    assert sum("opens with" in row["what"] for row in rows) == 3


LYING = """
from agentrl import Demonstration, Env, Task

class Lying(Env):
    process = False

    def tasks(self, split):
        return [Task(id=f"{split}{i}", data={"split": split, "i": i}) for i in range(3)]

    def reset(self, *, seed=None, options=None):
        return "hello", {}

    def step(self, action):
        return "", 0.0, True, False, {}

    def demonstrations(self, split, seed):
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]
        for task in self.tasks(split):
            yield Demonstration(task=task, messages=said)
"""


def test_code_runs_in_a_sandbox_and_its_failure_is_an_exit_code(
    agentrl: Shell, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("print('hello')\n40 + 2")
    bad.write_text("1 / 0")
    code, out, _ = agentrl("sandbox", "run", str(good))
    assert (code, out.split()) == (0, ["hello", "42"])
    code, _, err = agentrl("sandbox", "run", str(bad))
    assert code == 1 and "ZeroDivisionError" in err


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.startswith("agentrl, version ")


def test_a_torchvision_for_another_torch_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    metadata = tmp_path / "torchvision-0.28.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ConfigError: the installed torchvision was built for another torch")
    assert "pip uninstall -y torchvision torchaudio torchcodec" in line


@pytest.mark.parametrize("option", [("--threshold", "-1"), ("--top", "0")])
def test_mismatch_refuses_what_would_list_everything_or_nothing(
    agentrl: Shell, tmp_path: Path, option: tuple[str, str]
) -> None:
    code, _, error = agentrl("mismatch", str(tmp_path), *option)
    assert code == 2 and f"Invalid value for '{option[0]}'" in error


@pytest.mark.parametrize("adapters", [(), ("--adapters",)])
def test_half_an_export_is_none(
    agentrl: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapters: tuple[str, ...]
) -> None:
    class Whole:
        def save_pretrained(self, out: Path) -> None:
            (out / "config.json").write_text("{}")

    class Full:
        def save_pretrained(self, out: Path) -> None:
            raise PermissionError(28, "No space left on device", str(out))

    def export_adapters(run: Path, out: Path, **_: object) -> str:
        Whole().save_pretrained(out)
        Full().save_pretrained(out)
        return "never said"

    loaded = SimpleNamespace(model=Whole(), tokenizer=Full(), source="it")
    monkeypatch.setattr("agentrl.train.open_model.open_run_model", lambda *_, **__: loaded)
    monkeypatch.setattr("agentrl.train.open_model.export_adapters", export_adapters)
    out = tmp_path / "out"
    for _ in range(2):  # the place is not taken by what failed
        code, _, err = agentrl("export", str(tmp_path), str(out), *adapters)
        assert code == 2 and "No space left" in err
        assert not out.exists()


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Have SIGINT raise: a job in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("is_begun", [True, False])
def test_ctrl_c_names_the_command_that_goes_on_where_there_is_a_run(
    is_begun: bool, agentrl: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def train(config: object, *, announce: object, begun: Callable[[Path], None]) -> None:
        if is_begun:
            begun(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr("agentrl.launch.train", train)
    code, _, err = agentrl("train", "--env", "guess_number", "telemetry.quiet=true")
    assert code == 130
    told = f"no checkpoint is saved yet, so it begins anew with agentrl train --resume {tmp_path}"
    assert err.splitlines()[-1] == (
        f"Interrupted: stopped by Ctrl-C; {told}" if is_begun else "interrupted"
    )


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_of_supervised_training_says_how_to_go_on(
    agentrl: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def fine_tune(*arguments: object, **options: object) -> None:
        (tmp_path / "out" / "sft" / "checkpoints" / "step_000003").mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr("agentrl.sft.fine_tune", fine_tune)
    out = str(tmp_path / "out")
    code, _, err = agentrl("sft", "--env", "guess_number", "--model", "tiny", "--out", out)
    assert code == 130
    assert err.splitlines()[-1] == (
        "Interrupted: stopped by Ctrl-C; the checkpoint of step 3 is saved; go on with the same "
        "command and --resume"
    )
