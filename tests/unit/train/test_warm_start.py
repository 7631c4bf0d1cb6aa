from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig, MixEntry
from agentrl.errors import EnvError, ModelError
from agentrl.model.cache import cache_root
from agentrl.testing import FakeSandboxes
from agentrl.train.config import WarmStartConfig
from agentrl.train.environments import make_environments
from agentrl.train.warm_start import (
    WarmStart,
    cache_key,
    collect_splits,
    sft_config,
    warm_start,
)
from agentrl.types import Message

RECIPE = WarmStartConfig(steps=12, episodes_per_step=8, lr=1e-2, vocab_size=300)
SOURCE = """
from agentrl.env.base import Demonstration
from agentrl.testing import EchoEnv
from agentrl.types import Task

class Polite(EchoEnv):
    def demonstrations(self, split, seed):
        index = 0
        while True:
            messages = [
                {"role": "user", "content": f"Say yes. {index % 7}"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "You said: yes"},
                {"role": "assistant", "content": f"done {index % 7}"},
            ]
            yield Demonstration(task=Task(id=str(index), data={}), messages=messages)
            index += 1
"""


@pytest.fixture
def env_config(tmp_path: Path) -> EnvConfig:
    (tmp_path / "polite.py").write_text(SOURCE)
    return EnvConfig(id=f"{tmp_path / 'polite.py'}:Polite", process=False)


def _run(config: EnvConfig, cache: Path, **kwargs: Any) -> WarmStart:
    return asyncio.run(
        warm_start(
            RECIPE,
            make_environments(config),
            sandboxes=FakeSandboxes(),
            cache=cache,
            **kwargs,
        )
    )


def _weights(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_a_model_that_transformers_loads_and_that_has_learned(
    env_config: EnvConfig, tmp_path: Path
) -> None:
    stages: list[tuple[str, int, int]] = []

    def report(stage: str, done: int, total: int, loss: float | None = None) -> None:
        stages.append((stage, done, total))

    made = _run(env_config, tmp_path / "cache", report=report)
    assert not made.cached
    assert made.facts["first_loss"] > 4 > 2 > made.facts["validation_loss"]
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == [
        "demonstrations",
        "tokenizer",
        "sft",
    ]
    assert stages[-1] == ("sft", 12, 12)
    assert all(done <= total for _, done, total in stages)
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    messages: list[Message] = [{"role": "user", "content": "Say yes. 3"}]
    ids = Renderer(tokenizer).begin(messages).record.ids
    model = AutoModelForCausalLM.from_pretrained(made.path)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits
    assert tokenizer.decode(logits[0, -1].argmax()).startswith("y")


def test_the_second_run_takes_it_from_the_cache(env_config: EnvConfig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = _run(env_config, cache)

    def nothing_to_do(*args: Any) -> None:
        raise AssertionError("a cached model was made again")

    second = _run(env_config, cache, report=nothing_to_do)
    assert second.cached and second.path == first.path and second.facts == first.facts
    assert os.listdir(cache / "warm_start") == [first.path.name]


def test_made_again_it_has_the_same_bits(env_config: EnvConfig, tmp_path: Path) -> None:
    one, two = (_weights(_run(env_config, tmp_path / name).path) for name in ("a", "b"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_whatever_shapes_the_model_changes_the_key(env_config: EnvConfig, tmp_path: Path) -> None:
    def key(recipe: WarmStartConfig = RECIPE, config: EnvConfig = env_config) -> str:
        return cache_key(recipe, make_environments(config))

    known = {key()}
    assert key() in known  # and nothing else does
    for field in dataclasses.fields(WarmStartConfig):
        value = getattr(RECIPE, field.name)
        known.add(key(dataclasses.replace(RECIPE, **{field.name: value + 1})))
    known.add(key(config=dataclasses.replace(env_config, kwargs={"num_turns": 2})))
    path = tmp_path / "edited.py"
    path.write_text(SOURCE.replace("done", "over"))
    known.add(key(config=EnvConfig(id=f"{path}:Polite")))
    other = MixEntry(id=f"{path}:Polite")
    for share in (1.0, 2.0):
        mix = [MixEntry(id=env_config.id, weight=share), other]
        known.add(key(config=EnvConfig(mix=mix)))
        known.add(key(config=EnvConfig(mix=mix[::-1])))
    assert len(known) == 1 + len(dataclasses.fields(WarmStartConfig)) + 2 + 4
    # Where there is one environment, it does not matter how that was written.
    assert key(config=EnvConfig(mix=[MixEntry(id=env_config.id, weight=3.0)])) == key()
    # Proportions count, not the numbers that they are written with.
    halves = [EnvConfig(mix=[MixEntry(id=env_config.id, weight=w)] * 2) for w in (1.0, 5.0)]
    assert key(config=halves[0]) == key(config=halves[1])


def test_demonstrations_of_a_mix_are_interleaved_by_weight(
    env_config: EnvConfig, tmp_path: Path
) -> None:
    (tmp_path / "rude.py").write_text(SOURCE.replace("yes", "no"))
    rude = MixEntry(id=f"{tmp_path / 'rude.py'}:Polite", name="rude", weight=3.0)
    config = EnvConfig(mix=[MixEntry(id=env_config.id, weight=1.0), rude], process=False)
    found = asyncio.run(
        collect_splits(
            sft_config(RECIPE),
            make_environments(config),
            sandboxes=FakeSandboxes(),
            report=lambda stage, done, total, loss=None: None,
        )
    )
    said = [example.messages[1]["content"] for example in found["train"]]
    assert len(said) == RECIPE.steps * RECIPE.episodes_per_step
    for start in range(0, len(said), 4):
        assert sorted(said[start : start + 4]) == ["no", "no", "no", "yes"]
    # Each environment's own order is kept.
    yes = [item for item in found["train"] if item.messages[1]["content"] == "yes"]
    assert [e.messages[0]["content"][-1] for e in yes[:9]] == [str(i % 7) for i in range(9)]
    assert len(found["val"]) == 256


def test_a_training_that_dies_leaves_nothing_behind(env_config: EnvConfig, tmp_path: Path) -> None:
    def dies(stage: str, done: int, total: int, loss: float | None = None) -> None:
        if stage == "sft" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(env_config, tmp_path / "cache", report=dies)
    assert os.listdir(tmp_path / "cache" / "warm_start") == []


def test_ctrl_c_ends_a_training_at_its_next_step(env_config: EnvConfig, tmp_path: Path) -> None:
    steps: list[int] = []

    def interrupts(stage: str, done: int, total: int, loss: float | None = None) -> None:
        if stage == "sft":
            steps.append(done)
            if done == 3:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):  # by asyncio.run, once all has been cleaned up
        _run(env_config, tmp_path / "cache", report=interrupts)
    assert steps == [1, 2, 3]
    assert os.listdir(tmp_path / "cache" / "warm_start") == []


def test_an_environment_without_demonstrations_is_refused_with_the_fix(tmp_path: Path) -> None:
    config = EnvConfig(id="agentrl.testing:EchoEnv")
    with pytest.raises(EnvError, match=r"demonstrations\(split, seed\).*model\.path"):
        _run(config, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_names_the_variable(
    env_config: EnvConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("AGENTRL_CACHE", str(blocker / "cache"))
    assert cache_root() == blocker / "cache"
    with pytest.raises(ModelError, match="AGENTRL_CACHE"):
        _run(env_config, cache_root())


def test_a_damaged_cache_entry_is_named(env_config: EnvConfig, tmp_path: Path) -> None:
    made = _run(env_config, tmp_path / "cache")
    (made.path / "warm_start.json").write_text("{")
    with pytest.raises(ModelError, match=made.path.name):
        _run(env_config, tmp_path / "cache")
