"""`agentrl sft` from files to a model that loads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MemoryPlanError,
    ModelError,
    Preempted,
    RegistryError,
    SandboxUnavailable,
)
from agentrl.model import load
from agentrl.sft import fine_tune
from agentrl.sft_start import (
    SFTSources,
    part_settings,
    refuse_start,
    sft_settings,
    sft_sources,
)
from agentrl.telemetry.jsonl import read_metrics
from agentrl.train import sft_output
from agentrl.train.sft_config import LAST_FILE
from agentrl.train.sft_data import to_batch

SETTINGS = ["steps=6", "episodes_per_step=4", "lr=1e-3", "warmup_steps=2", "eval_every=2"]


def _file(path: Path, count: int = 20) -> str:
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        digit = rng.randrange(5)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": str(digit)},
                    {"role": "assistant", "content": str(digit + 1)},
                ]
            }
        )
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def _tune(data: str, out: Path, *overrides: str, **kwargs: Any) -> dict[str, Any]:
    settings = sft_settings([*SETTINGS, *overrides])
    sources = SFTSources(data=data, val=kwargs.pop("val", None))
    model = kwargs.pop("model", "tiny")
    return asyncio.run(fine_tune(settings, sources, model=model, out=out, quiet=True, **kwargs))


def _weights(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def test_a_file_becomes_a_model_with_metrics_plan_and_report(tmp_path: Path) -> None:
    facts = _tune(_file(tmp_path / "a.jsonl"), tmp_path / "out")
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(_weights(tmp_path / "out")) > 1e5
    lines = read_metrics(tmp_path / "out" / "sft" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "sft/validation_loss" in line] == [2, 4, 6]
    assert lines[-1]["sft/validation_loss"] == facts["validation_loss"]
    assert json.loads((tmp_path / "out" / "sft" / "memory_plan.json").read_text())["planned"]
    assert "Supervised loss" in (tmp_path / "out" / "sft" / "report.html").read_text()


def test_a_run_that_was_broken_off_ends_as_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _file(tmp_path / "a.jsonl")
    _tune(data, tmp_path / "whole")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.sft.export_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            _tune(data, tmp_path / "out", "save_every=4")
    assert not (tmp_path / "out" / LAST_FILE).exists()
    with pytest.raises(ConfigError, match=r"not empty.*go on with it by adding --resume"):
        _tune(data, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"settings: lr was 0\.001 and is now 0\.002\. Use"):
        _tune(data, tmp_path / "out", "lr=2e-3", resume=True)
    with pytest.raises(CheckpointError, match="digest of the conversations to learn was"):
        _tune(_file(tmp_path / "b.jsonl", 30), tmp_path / "out", resume=True)
    _tune(data, tmp_path / "out", "tokens_per_micro_batch=4096", "save_every=4", resume=True)
    assert torch.allclose(_weights(tmp_path / "out"), _weights(tmp_path / "whole"), atol=1e-6)
    lines = read_metrics(tmp_path / "out" / "sft" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="finished"):
        _tune(data, tmp_path / "out", resume=True)


def test_a_start_that_was_killed_while_its_model_was_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _file(tmp_path / "a.jsonl")
    _tune(data, tmp_path / "whole")
    save = PreTrainedModel.save_pretrained

    def killed_half_way(model: PreTrainedModel, folder: Path) -> None:
        save(model, folder)
        (folder / "model.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", killed_half_way)
        with pytest.raises(KeyboardInterrupt):
            _tune(data, tmp_path / "out")
    _tune(data, tmp_path / "out", resume=True)
    assert torch.equal(_weights(tmp_path / "out"), _weights(tmp_path / "whole"))


def test_sigterm_saves_the_step_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _file(tmp_path / "a.jsonl")
    _tune(data, tmp_path / "whole", "steps=4")
    num_steps = 0

    def to_batch_until_told_to_stop(examples: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return to_batch(examples)

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.train.sft.to_batch", to_batch_until_told_to_stop)
        with pytest.raises(Preempted, match="after step 3 of 4; go on with the same command and"):
            _tune(data, tmp_path / "out", "steps=4", "eval_every=0", "grace_s=1e5")  # outlives this
    assert [p.name for p in (tmp_path / "out/sft/checkpoints").iterdir()] == ["step_000003"]
    assert not (tmp_path / "out" / LAST_FILE).exists()
    _tune(data, tmp_path / "out", "steps=4", resume=True)
    assert torch.equal(_weights(tmp_path / "out"), _weights(tmp_path / "whole"))


def test_what_a_path_alone_can_tell_is_refused_before_torch_loads(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    (tmp_path / "begun" / "sft").mkdir(parents=True)
    sources = SFTSources(data="a.jsonl")
    for name, resume, said in [
        ("full", False, "not empty; give another"),
        ("full", True, "nothing to resume"),
        ("begun", False, "--resume"),
    ]:
        with pytest.raises(ConfigError, match=said):
            refuse_start(sources, out=tmp_path / name, resume=resume)
    refuse_start(sources, out=tmp_path / "begun", resume=True)
    code = (
        "import sys, agentrl.sft_start as start\n"
        "try: start.sft_settings(['turns=first'])\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["ConfigError", "False"]


def test_a_model_that_is_not_there_is_named_once_and_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "hub_answers", lambda: False)
    with pytest.raises(ModelError, match=r"no model 'nobody/x': .*hub cannot be reached.*network"):
        _tune(str(tmp_path / "none.jsonl"), tmp_path / "out", model="nobody/x")
    assert "nobody" not in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        def export_pretrained(self, directory: Path) -> None:
            (directory / "config.json").write_text("{}")
            raise OSError("disk full")

    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="disk full"):
        sft_output.export_whole(Engine(), tmp_path / "out")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "out" / "config.json").exists()


def test_adapters_come_out_merged(tmp_path: Path) -> None:
    data = _file(tmp_path / "a.jsonl")
    _tune(data, tmp_path / "start", "lr=0")
    _tune(data, tmp_path / "out", "lora.rank=4", "lr=1e-2", model=str(tmp_path / "start"))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "start").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("proj" in name for name in changed)


def test_adapters_go_on_only_on_the_weights_that_they_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _file(tmp_path / "a.jsonl")
    _tune(data, tmp_path / "start", "steps=1", "warmup_steps=0")
    _tune(data, tmp_path / "other", "steps=1", "warmup_steps=0", "lr=2e-3")
    how = {"model": str(tmp_path / "start")}

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.sft.export_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            _tune(data, tmp_path / "out", "save_every=4", "lora.rank=2", **how)
    weights, kept = tmp_path / "start" / "model.safetensors", tmp_path / "kept"
    weights.rename(kept)
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"--model .* was '\w{32}' and is now '\w{32}'"):
        _tune(data, tmp_path / "out", "save_every=4", "lora.rank=2", resume=True, **how)
    kept.replace(weights)
    _tune(data, tmp_path / "out", "save_every=4", "lora.rank=2", resume=True, **how)
    assert (tmp_path / "out" / "config.json").exists()


def test_held_out_conversations_of_a_file_of_their_own(tmp_path: Path) -> None:
    data = _file(tmp_path / "a.jsonl")
    strange = tmp_path / "val.jsonl"
    strange.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(DataError, match=r"val\.jsonl, line 1.*no assistant message"):
        _tune(data, tmp_path / "out", val=str(strange))
    assert not (tmp_path / "out").exists()  # a start that is refused leaves nothing
    with pytest.raises(DataError, match="--val='missing.jsonl'.*no such file"):
        _tune(data, tmp_path / "out", val="missing.jsonl")


def test_what_does_not_fit_is_refused_with_the_settings_of_sft(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(vocab_size=151936, hidden_size=8192, num_hidden_layers=80)
    config.save_pretrained(tmp_path / "large")
    data = _file(tmp_path / "a.jsonl")
    with pytest.raises(MemoryPlanError, match=r"\n  recompute=full") as caught:
        _tune(data, tmp_path / "out", model=str(tmp_path / "large"))
    assert "actor." not in str(caught.value)


@pytest.mark.parametrize(
    "item",
    [
        "stepz=3",
        "steps=few",
        "turns=first",
        "cluster=ray2",
        "seed=-1",
        "betas=[0.9,1]",
        "eps=nan",
        "lr=nan",
        "lr=3",
        "warmup_steps=-1",
        "min_lr_fraction=2",
        "start_timeout_s=nan",
        "address=head",
        "ranks=100000000000",
        "gpus_per_rank=nan",
    ],
)
def test_settings_are_refused_by_name(item: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^{item.split('=')[0]}[=:]|stepz"):
        sft_settings(["cluster=ray", item])


def test_a_warm_up_that_outlasts_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps=6 with steps=6.*use at most 5"):
        sft_settings(["steps=6", "warmup_steps=6"])
    data = _file(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"warmup_steps=50 with epochs=1, which is steps="):
        _tune(data, tmp_path / "out", "epochs=1", "warmup_steps=50")


@pytest.mark.timeout(120)
def test_two_ranks_on_ray_end_as_one_process(tmp_path: Path) -> None:
    data = _file(tmp_path / "a.jsonl")
    one = _tune(data, tmp_path / "one")
    two = _tune(data, tmp_path / "two", "cluster=ray", "ranks=2")
    assert two["last_loss"] == pytest.approx(one["last_loss"], abs=1e-5)
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], abs=1e-5)
    assert torch.allclose(_weights(tmp_path / "one"), _weights(tmp_path / "two"), atol=1e-5)


ASKING = """
from agentrl import Demonstration, Env, ScriptedTurn, Task
from agentrl.types import ToolCall

class Asking(Env):
    process = False
    tools = ("python",)

    def __init__(self, code: str = "print(1)"):
        self._code = code

    def tasks(self, split):
        return [Task(id="a", data={})]

    def reset(self, *, seed=None, options=None):
        return "What does it print?", {}

    def step(self, action):
        return "", 1.0, True, False, {}

    def demonstrations(self, split, seed):
        call = ToolCall(name="python", arguments={"code": self._code})

        def policy(messages):
            if messages[-1]["role"] == "tool":
                return ScriptedTurn(content=messages[-1]["content"].strip())
            return ScriptedTurn(tool_calls=[call])

        while True:
            yield Demonstration(task=self.tasks(split)[0], policy=policy)
"""

BROKEN_BOXES = """
from agentrl.errors import SandboxUnavailable

class Boxes:
    def __init__(self, engine: str):
        self._engine = engine

    async def start(self):
        raise SandboxUnavailable(f"no engine {self._engine}")

    async def create(self, limits=None):
        raise AssertionError("never started")

    async def close(self):
        pass
"""


def _play(env: str, out: Path, *playing: str, **kwargs: Any) -> dict[str, Any]:
    settings = sft_settings(["steps=2", "episodes_per_step=2", "warmup_steps=0", "save_every=1"])
    sources = sft_sources(env_id=env, playing=playing)
    return asyncio.run(fine_tune(settings, sources, model="tiny", out=out, quiet=True, **kwargs))


def test_demonstrations_are_played_under_settings_of_env_sandbox_and_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env.py").write_text(ASKING)
    env = f"{tmp_path}/env.py:Asking"
    found: list[Any] = []

    def tune(_: Any, __: Any, ___: Any, examples: Any, *____: Any) -> dict[str, Any]:
        found.extend(examples["val"])
        return {}

    monkeypatch.setattr("agentrl.sft._tune", tune)
    monkeypatch.setattr("agentrl.train.warm_start._NUM_VALIDATION", 4)
    _play(env, tmp_path / "out", "env.kwargs.code='print(6 * 7)'", "sandbox.id=none")
    assert {example.messages[-1]["content"] for example in found} == {"42"}
    (tmp_path / "box.py").write_text(BROKEN_BOXES)
    boxes = [f"sandbox.id='{tmp_path}/box.py:Boxes'", "sandbox.kwargs.engine=mine"]
    with pytest.raises(SandboxUnavailable, match="no engine mine"):
        _play(env, tmp_path / "out", *boxes)
    with pytest.raises(ConfigError, match=r"env.kwargs.cod: .*did you mean 'code'"):
        _play(env, tmp_path / "out", "env.kwargs.cod=x")
    with pytest.raises(RegistryError, match="did you mean 'none'"):
        _play(env, tmp_path / "out", "sandbox.id=nome")
    with pytest.raises(ConfigError, match=r"tools.specs.pythn=.*did you mean 'python'"):
        _play(env, tmp_path / "out", "tools.specs.pythn=./mine.yaml")
    assert not (tmp_path / "out").exists()


def test_how_demonstrations_are_played_is_kept_and_a_resume_has_to_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def goes_on(*playing: str) -> None:
        _play("code_sandbox", tmp_path / "out", *playing, resume=True)

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.sft.export_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            _play("code_sandbox", tmp_path / "out", "env.kwargs.level=2", "sandbox.id=none")
    kept = yaml.safe_load((tmp_path / "out" / "sft" / "config.yaml").read_text())
    assert (kept["env"]["kwargs"], kept["sandbox"]["id"]) == ({"level": 2}, "none")
    with pytest.raises(CheckpointError, match=r"env.kwargs.level was 2 and is now 1"):
        goes_on("env.kwargs.level=1", "sandbox.id=none")
    with pytest.raises(CheckpointError, match=r"sandbox.id was 'none' and is now 'local'"):
        goes_on("env.kwargs.level=2")
    goes_on(
        "env.kwargs.level=2", "sandbox.id=none", "sandbox.max_open=4", "tools.breaker.give_up_s=9"
    )
    assert (tmp_path / "out" / LAST_FILE).exists()


def test_several_environments_may_demonstrate() -> None:
    mix = ["env.mix=[{id: calculator, weight: 2}, {id: qa}]"]
    found = sft_sources(playing=mix).demonstrations
    assert found is not None and [entry.id for entry in found.env.mix] == ["calculator", "qa"]


@pytest.mark.parametrize(
    ("options", "playing", "said"),
    [
        ({"data": "a.jsonl"}, ["sandbox.id=none"], "sandbox.id=none with --data: .*leave them out"),
        ({"data": "a.jsonl"}, ["env={kwargs: {level: 2}}"], "with --data"),
        ({"env_id": "qa"}, ["env.id=calculator"], "env.id: .*write --env ID"),
        ({}, ["env={id: calculator}"], "env.id: .*write --env ID"),
        ({}, ["env.kwargs.level=2"], "env.id is not set: choose an environment with --env"),
        ({"env_id": "qa"}, ["env.mix=[{id: calculator}]"], "which one is meant"),
        ({}, ["env.mix=[{id: qa, algo: {advantage: rloo}}]"], r"env.mix\[0\].algo=.*leave it out"),
        ({"env_id": "qa"}, ["env.tasks_timeout_s=3"], "env.tasks_timeout_s: .*leave it out"),
        ({"env_id": "qa"}, ["env.step_timeout_s=0"], "env.step_timeout_s=0.*above 0"),
        ({"env_id": "qa"}, ["sandbox.idd=none"], "did you mean sandbox.id"),
        ({"env_id": "qa"}, ["tools.spec.a=x"], "unknown setting 'tools.spec.a'"),
    ],
)
def test_settings_of_playing_that_cannot_work_or_go_unread_are_refused(
    options: dict[str, str], playing: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        sft_sources(**options, playing=playing)


def test_settings_are_parted_by_their_section() -> None:
    training, playing = part_settings(
        ["lr=1", "+env.kwargs.a=1", "lora.rank=2", "tools={specs: {}}"]
    )
    assert training == ["lr=1", "lora.rank=2"]
    assert playing == ["+env.kwargs.a=1", "tools={specs: {}}"]
