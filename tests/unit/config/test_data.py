from __future__ import annotations

import pytest

from agentrl.config.load import from_dict, load, to_dict
from agentrl.errors import ConfigError

BASE = ["env.id=any"]


def test_files_columns_and_the_curriculum_are_settings() -> None:
    config = load(
        [
            *BASE,
            "data.train=a.jsonl",
            "data.val='hf:a/b:main:test'",
            "data={max_prompt_tokens: 100, columns: {prompt: question, tags: [level, kind]}}",
            "data.overlong_prompts=refuse",
            "data.curriculum.id=success_band",
            "data.curriculum.kwargs.low=0.2",
        ]
    )
    assert config.data.sources() == {"train": "a.jsonl", "val": "hf:a/b:main:test"}
    assert (config.data.columns.prompt, config.data.columns.answer) == ("question", "answer")
    assert config.data.columns.tags == ["level", "kind"]
    assert config.data.curriculum.kwargs == {"low": 0.2}
    assert from_dict(to_dict(config), source="x") == config


@pytest.mark.parametrize("model", [[], ["model=tiny"], ["model.path=some/model"]])
def test_epochs_take_the_place_of_steps(model: list[str]) -> None:
    config = load([*BASE, *model, "trainer.epochs=1.5"])
    assert (config.trainer.epochs, config.trainer.total_steps) == (1.5, 0)
    longer = load(["trainer.epochs=2"], base=config)
    assert (longer.trainer.epochs, longer.trainer.total_steps) == (2, 0)
    by_steps = load(["trainer.total_steps=9"], base=config)
    assert (by_steps.trainer.epochs, by_steps.trainer.total_steps) == (None, 9)
    assert load(["trainer.seed=1"], base=config).trainer.epochs == 1.5
    assert load(["trainer.epochs=1"], base=by_steps).trainer.total_steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["trainer.epochs=1", "trainer.total_steps=4"],
            "trainer.epochs=1.0 and trainer.total_steps=4 together: which one is meant",
        ),
        (["trainer.epochs=0"], "trainer.epochs=0.0: must be a finite number above 0"),
        (["trainer.epochs=nan"], "trainer.epochs=nan"),
        (["trainer.total_steps=0"], "trainer.total_steps=0: must be at least 1, or set"),
        (["data.train=''"], "data.train='' is empty"),
        (["data.max_prompt_tokens=9"], "data.max_prompt_tokens=9 without a file"),
        (["data.train=a", "data.max_prompt_tokens=0"], "must be at least 1"),
        (
            ["data.train=a", "data.max_prompt_tokens=768"],
            "no room for an answer within rollout.max_context_tokens=768",
        ),
        (
            ["data.train=a", "data.max_prompt_tokens=9", "data.columns.prompt=null"],
            "there is no prompt to measure",
        ),
        (["data.columns.id=nr"], "data.columns without a file"),
        (["data.curriculum.max_skips=0"], "max_skips=0: must be at least 1"),
        (["data.curriculum.max_skips=7"], "max_skips=7 without data.curriculum.id: nothing skips"),
        (["trainer.epochs=1e308"], "trainer.epochs=1e+308: must be at most 1000000000"),
        (["trainer.total_steps=1000000001"], "total_steps=1000000001: must be at most 1000000000"),
        (["data.curriculum.kwargs.low=0.5"], "without data.curriculum.id"),
        (["data.overlong_prompts=cut"], "cut"),
        (["data.columns.prmpt=x"], "did you mean data.columns.prompt"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*BASE, *settings])
    assert message in str(caught.value)


def test_files_and_epochs_go_with_one_environment() -> None:
    mix = "env.mix=[{id: a}, {id: b}]"
    with pytest.raises(ConfigError, match="data.test with env.mix: which of its environments"):
        load([mix, "data.test=a.jsonl"])
    with pytest.raises(ConfigError, match="trainer.epochs=1.0 with env.mix"):
        load([mix, "trainer.epochs=1"])
    load(["env.mix=[{id: a}]", "trainer.epochs=1", "data.test=a.jsonl"])
