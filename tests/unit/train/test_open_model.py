"""The policy of a run, from what its checkpoints hold."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.cli.export import command as export
from agentrl.config.schema import Config
from agentrl.dist.config import EngineConfig, LoraConfig
from agentrl.dist.engine import PendingSave
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.lora import attach_adapters
from agentrl.dist.ranks import Ranks
from agentrl.dist.sharded_state import save_sharded
from agentrl.errors import CheckpointError
from agentrl.model.load import LoadedModel
from agentrl.model.tiny import build_tiny, tiny_config
from agentrl.playground import open_policy
from agentrl.rollout.config import RolloutConfig
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.config import ModelConfig, TrainerConfig
from agentrl.train.open_model import (
    ProgressLines,
    keep_model_files,
    open_model,
    open_run_model,
)
from agentrl.train.seal import seal

IDS = torch.arange(3, 23)[None]
LORA = LoraConfig(rank=4, alpha=8.0)


def _model(seed: int = 0) -> LoadedModel:
    tokenizer = make_tokenizer()
    shape = tiny_config(len(tokenizer), hidden_size=32, num_layers=2, num_heads=1, head_dim=16)
    return LoadedModel(model=build_tiny(tokenizer, seed, shape), tokenizer=tokenizer, source="tiny")


def _engine(model: LoadedModel) -> FSDPEngine:
    return FSDPEngine(model.model, model.tokenizer, EngineConfig(), ranks=Ranks.single("cpu"))


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return model.eval()(IDS).logits


def _save(run: Path, step: int, engine: Any, score: float | None = None, **config: Any) -> None:
    store = CheckpointStore(run / "checkpoints", config=config, keep_last=9)
    store.save(step, {"actor": engine}, {"step": step}, score=score)
    store.flush()


def _run_of_three(run: Path, scores: tuple[float | None, ...]) -> list[Tensor]:
    """Save three policies; return what each of them computes."""
    run.mkdir()
    model = _model()
    engine = _engine(model)
    keep_model_files(model, run)
    found = []
    for step, score in enumerate(scores, start=1):
        with torch.no_grad():
            model.model.get_input_embeddings().weight.mul_(1.1)
        _save(run, step, engine, score)
        found.append(_logits(model.model))
    return found


def test_a_run_gives_its_newest_its_best_or_any_policy(tmp_path: Path) -> None:
    logits = _run_of_three(tmp_path / "run", (0.1, 0.9, None))
    choices: list[dict[str, Any]] = [{"step": 1}, {"best": True}, {}]
    for index, choice in enumerate(choices):
        loaded = open_run_model(tmp_path / "run", device="cpu", **choice)
        assert torch.equal(_logits(loaded.model), logits[index]), choice
        assert loaded.source.endswith(f"step {index + 1}")


def test_a_template_that_is_given_replaces_that_of_the_run(tmp_path: Path) -> None:
    _run_of_three(tmp_path / "run", (None,))
    (tmp_path / "run" / "config.yaml").touch()
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    config = ModelConfig(path=str(tmp_path / "run"), device="cpu")
    opened = [
        asyncio.run(open_model(chosen, [], sandboxes=FakeSandboxes(), quiet=True))
        for chosen in (config, replace(config, chat_template=str(template)))
    ]
    own, other = (loaded.tokenizer.chat_template for loaded in opened)
    assert own == make_tokenizer().chat_template and other == "{{ messages }}"


@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["whole", "adapters"])
def test_a_resumed_run_needs_no_template_but_its_own(tmp_path: Path, lora: LoraConfig) -> None:
    run = tmp_path / "run"
    _run_with_adapters(run) if lora.rank else _run_of_three(run, (None,))
    (run / "config.yaml").touch()
    gone = str(tmp_path / "deleted_since.jinja")
    config = Config(
        model=ModelConfig(path="some/model", chat_template=gone, device="cpu"),
        lora=lora,
        rollout=RolloutConfig(max_response_tokens=256, max_context_tokens=512),
        trainer=TrainerConfig(resume=str(run)),
    )
    loaded = asyncio.run(open_policy(config, [], FakeSandboxes()))  # type: ignore[arg-type]
    assert loaded.tokenizer.chat_template == make_tokenizer().chat_template


def test_the_best_policy_is_exported_as_transformers_loads_it(tmp_path: Path) -> None:
    logits = _run_of_three(tmp_path / "run", (0.1, 0.9, None))
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    done = CliRunner().invoke(export, [run, out, "--best"], catch_exceptions=False)
    assert "step 2" in done.output
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(_logits(loaded), logits[1])
    both = CliRunner().invoke(export, [run, str(tmp_path / "x"), "--best", "--step", "1"])
    assert "which one is meant" in str(both.exception) and not (tmp_path / "x").exists()


def test_without_a_measured_checkpoint_there_is_no_best_one(tmp_path: Path) -> None:
    _run_of_three(tmp_path / "run", (None,))
    with pytest.raises(CheckpointError, match=r"validation split \(val\), so none is the best"):
        open_run_model(tmp_path / "run", best=True)


def test_a_step_without_a_checkpoint_is_told_which_there_are(tmp_path: Path) -> None:
    _run_of_three(tmp_path / "run", (None, None, None))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; it has: 1, 2, 3$"):
        open_run_model(tmp_path / "run", step=7)


class _AdapterEngine:
    """Saves adapters alone, as an engine that trains them does."""

    def __init__(self, adapters: dict[str, Tensor]) -> None:
        self.adapters = adapters

    def save(self, directory: Path) -> PendingSave:
        named = {f"model/{name}": value for name, value in self.adapters.items()}
        return save_sharded(directory, named, {}, rank=0)


def _run_with_adapters(run: Path) -> Tensor:
    """Save a run that trained adapters; return what its policy computes."""
    run.mkdir()
    model = _model()
    keep_model_files(model, run, frozen=_engine(model))
    adapters = dict(attach_adapters(model.model, LORA, seed=1).tensors(lambda tensor: tensor))
    with torch.no_grad():
        for index, value in enumerate(adapters.values()):
            generator = torch.Generator().manual_seed(index)
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    _save(run, 1, _AdapterEngine(adapters), lora=asdict(LORA), model={"path": "tiny"})
    return _logits(model.model)


def test_adapters_are_merged_into_what_they_were_trained_on(tmp_path: Path) -> None:
    adapted = _run_with_adapters(tmp_path / "run")
    loaded = open_run_model(tmp_path / "run", device="cpu").model
    assert float((_logits(loaded) - adapted).abs().max()) < 1e-4
    assert float((_logits(_model().model) - adapted).abs().max()) > 1e-2, "they changed nothing"
    assert not any("lora" in name for name in loaded.state_dict())


def test_adapters_are_exported_as_peft_loads_them(tmp_path: Path) -> None:
    from peft import PeftModel

    adapted = _run_with_adapters(tmp_path / "run")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    CliRunner().invoke(export, [run, out, "--adapters"], catch_exceptions=False)
    loaded = PeftModel.from_pretrained(_model().model, out)
    assert float((_logits(loaded) - adapted).abs().max()) < 1e-6
    assert loaded.peft_config["default"].base_model_name_or_path == f"{run}/model"


def test_a_run_without_adapters_exports_none(tmp_path: Path) -> None:
    _run_of_three(tmp_path / "run", (None,))
    done = CliRunner().invoke(export, [str(tmp_path / "run"), str(tmp_path / "x"), "--adapters"])
    assert "trained all weights" in str(done.exception) and not (tmp_path / "x").exists()


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    _run_with_adapters(tmp_path / "run")
    other = make_tokenizer()
    shape = tiny_config(len(other), hidden_size=32, num_layers=1, num_heads=1, head_dim=16)
    build_tiny(other, 0, shape).save_pretrained(tmp_path / "run" / "model")
    with pytest.raises(CheckpointError, match="damaged: config.json, model.safetensors changed"):
        open_run_model(tmp_path / "run", device="cpu")
    seal(tmp_path / "run" / "model")
    with pytest.raises(CheckpointError, match="are not those of the model"):
        open_run_model(tmp_path / "run", device="cpu")


def test_model_files_of_a_start_that_was_killed_are_written_again(tmp_path: Path) -> None:
    (tmp_path / ".writing-model").mkdir()
    (tmp_path / ".writing-model" / "half").write_text("")
    keep_model_files(_model(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert (tmp_path / "model" / "config.json").is_file()
    assert not (tmp_path / "model" / "half").exists()


def test_a_run_that_has_trained_adapters_cannot_go_on_without_what_they_belong_to(
    tmp_path: Path,
) -> None:
    _run_with_adapters(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    model = _model()
    with pytest.raises(CheckpointError, match=r"model' is missing: .*adapters .*restore it"):
        keep_model_files(model, tmp_path / "run", frozen=_engine(model), trained=True)
    assert not (tmp_path / "run" / "model").exists()


def test_progress_without_a_terminal_is_a_line_every_ten_seconds_and_at_the_end() -> None:
    lines: list[str] = []
    now = 0.0
    show = ProgressLines(lines.append, clock=lambda: now)
    for step in range(1, 31):
        now += 1.0
        show.report("sft", step, 30, 0.5)
    assert [line.split()[2] for line in lines] == ["10/30", "20/30", "30/30"]
    assert lines[0] == "supervised training 10/30  loss 0.500"
