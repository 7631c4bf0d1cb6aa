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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MemoryPlanError,
    ModelError,
    Preempted,
)
from agentrl.model import load
from agentrl.sft import fine_tune
from agentrl.sft_start import SFTSources, refuse_start, sft_settings
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
