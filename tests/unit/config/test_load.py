from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentrl.config.load import from_dict, from_yaml, load, to_dict
from agentrl.errors import ConfigError
from agentrl.rollout.config import FailurePolicy

ENV = "env.id=guess_number"


def refuse(*overrides: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load([ENV, *overrides])


def test_defaults_are_those_of_the_dataclasses() -> None:
    config = load([ENV])
    assert config.env.id == "guess_number"
    assert config.model.path == "tiny"
    assert config.failure.policy is FailurePolicy.retry_fresh


def test_a_group_chooses_a_preset_and_a_key_on_top_wins() -> None:
    assert load([ENV, "algo=dr_grpo"]).algo.advantage_kwargs == {"normalize_std": False}
    config = load([ENV, "algo=dr_grpo", "algo.advantage_kwargs.normalize_std=true"])
    assert config.algo.advantage_kwargs == {"normalize_std": True}
    assert config.algo.loss_agg == "seq-mean-token-sum-norm"


def test_an_unknown_choice_of_a_group_lists_the_known_ones() -> None:
    refuse("algo=gpro", match=r"algo=gpro: did you mean gspo or grpo\? known: bilevel, ")


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_misspelt_key_is_refused_with_the_nearest_however_it_is_written(prefix: str) -> None:
    refuse(f"{prefix}rollout.temprature=0.5", match="did you mean rollout.temperature")


def test_an_argument_in_the_place_of_a_setting_is_told_where_arguments_stand() -> None:
    refuse("algo.clip_low=0.1", match=r"arguments stand under .*algo.loss_kwargs.clip_low")
    refuse(
        "env.level=2", match=r"unknown setting 'env.level'.*arguments stand under env.kwargs.level"
    )


def test_a_key_in_the_wrong_section_is_found_by_its_name() -> None:
    refuse("trainer.max_staleness=1", match="did you mean rollout.max_staleness")


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("actor.lr=fast", "actor.lr.*fast"),
        ("trainer.total_steps=1.5", "trainer.total_steps.*1.5"),
        ("trainer.deterministic=perhaps", "trainer.deterministic"),
        ("failure.policy=retry", r"retry_fresh, min_group, mask, drop_group, fail_fast"),
        ("rollout=5", "rollout=5.*known: hf"),
    ],
)
def test_a_wrong_type_is_refused_with_the_key_and_the_value(override: str, match: str) -> None:
    refuse(override, match=match)


def test_yaml_spellings_of_numbers_and_booleans_mean_what_they_say() -> None:
    config = load([ENV, "actor.lr=1e-6", "trainer.deterministic=off", "trainer.seed=010"])
    assert config.actor.lr == 1e-6
    assert config.trainer.deterministic is False
    assert config.trainer.seed == 10, "never octal"


def test_kwargs_need_no_plus_and_keep_their_types() -> None:
    config = load([ENV, "env.kwargs.level=2", "env.kwargs={name: [a, 1], flag: true}"])
    assert config.env.kwargs == {"level": 2, "name": ["a", 1], "flag": True}


def test_names_of_any_kind_reach_a_mapping() -> None:
    config = load([ENV, "algo.reward_weights={outcome: 0, score/style: 5e-1}"])
    assert config.algo.reward_weights["score/style"] == 0.5
    assert config.algo.reward_weights["outcome"] == 0
    changed = load(["algo.reward_weights={score/style: 2}"], base=config)
    assert changed.algo.reward_weights == {
        "outcome": 0,
        "turn": 1,
        "tool": 1,
        "score/style": 2,
    }


@pytest.mark.parametrize(
    "override",
    [
        'sandbox.kwargs={url: "http://b:8400", token: "${env:TOKEN}"}',
        "sandbox.kwargs.token='${env:TOKEN}'",
    ],
)
def test_a_reference_to_a_secret_stays_one_in_whatever_is_written(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "the secret")
    config = load(["env.id=x", "sandbox.id=http", override])
    again = from_dict(to_dict(config), source="x")
    changed = load(["trainer.total_steps=3"], base=again)
    for one in (config, again, changed):
        assert one.sandbox.kwargs["token"] == "${env:TOKEN}"
        assert "the secret" not in str(to_dict(one))


def test_a_path_with_spaces_and_colons_reaches_the_environment_as_it_is() -> None:
    assert load(["env.id='./my envs/a.py:Env'"]).env.id == "./my envs/a.py:Env"


@pytest.mark.parametrize("text", ["trainer.seed", "~trainer.seed", "trainer.seed=1,2"])
def test_what_is_no_single_setting_is_refused(text: str) -> None:
    refuse(text, match="setting|several values|deleted")


def test_a_missing_environment_says_how_to_choose_one() -> None:
    with pytest.raises(ConfigError, match="--env NAME"):
        load([])


def test_the_stored_config_comes_back_equal(tmp_path: Path) -> None:
    config = load([ENV, "algo=rloo", "env.kwargs.level=2", "failure.policy=mask"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)))
    assert from_yaml(path) == config


def test_overrides_of_a_stored_config_change_only_what_they_name(tmp_path: Path) -> None:
    config = load([ENV, "trainer.seed=3", "env.kwargs.level=2"])
    changed = load(["trainer.total_steps=7", "algo=rloo", "env.kwargs.extra=1"], base=config)
    assert changed.trainer.total_steps == 7
    assert changed.trainer.seed == 3
    assert changed.algo.advantage == "rloo"
    assert changed.env.kwargs == {"level": 2, "extra": 1}


@pytest.mark.parametrize("text", ["- a list", "rollout: [", "rollout: {unknown: 1}"])
def test_a_damaged_stored_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        from_yaml(path)


def test_a_pretrained_model_does_not_get_the_recipe_of_the_embedded_one() -> None:
    tiny = load([ENV])
    pretrained = load([ENV, "model.path=some/model"])
    assert tiny.actor.lr > 1e-4
    assert pretrained.actor.lr < 1e-5
    assert pretrained.model.path == "some/model"
    assert load([ENV, "model.path=some/model", "actor.lr=2e-5"]).actor.lr == 2e-5


def test_the_embedded_model_named_by_path_keeps_its_recipe() -> None:
    assert load([ENV, "model.path=tiny"]) == load([ENV])


def test_a_pretrained_model_without_a_path_is_refused() -> None:
    refuse("model=pretrained", match="model.path")


@pytest.mark.parametrize(
    "override",
    [
        "env.kwargs={a: 1",
        "env.kwargs=*nowhere",
        "env.kwargs=" + "[" * 5000,
        "env.kwargs={a: " + "9" * 5000 + "}",
        "env.kwargs.a=" + "[" * 2000,
        "trainer.seed=" + "9" * 5000,
    ],
)
def test_what_cannot_be_parsed_is_refused_with_its_text(override: str) -> None:
    refuse(override, match=f"cannot read the setting .{override[:10]}")


@pytest.mark.parametrize("text", ["{1:2}", "{a:2}", "{1: 2}", "{a: {1: 2}}", "{a: [{b:2}]}"])
def test_a_mapping_without_names_is_refused_not_guessed(text: str) -> None:
    refuse(f"env.kwargs={text}", match=r"write \{name: value\}, with a blank after the colon")


@pytest.mark.parametrize("text", ["model.path=a(b", "env.id=a b:c,[", "env.id='abc"])
def test_a_value_that_needs_quotes_is_refused_with_how_to_quote(text: str) -> None:
    refuse(text, match=r"cannot read the setting .*quote values.*key='value'")


def test_a_stored_config_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"env:\n  id: \xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        from_yaml(path)


def test_lists_of_records_may_stand_inside_a_section_on_the_command_line() -> None:
    rules = "[{statistic: seq_mean_k1, low: 0.99, high: 1.01}, {statistic: token_k2, high: 0.5}]"
    config = load(
        [
            "env.id=guess_number",
            "algo.old_logprobs=recompute",
            f"algo.correction={{weight: token, upper: 3.0, reject: {rules}}}",
        ]
    )
    assert config.algo.correction.upper == 3.0
    assert [rule.statistic for rule in config.algo.correction.reject] == ["seq_mean_k1", "token_k2"]
    assert config.algo.correction.reject[0].low == 0.99


def test_a_list_may_be_written_on_several_lines() -> None:
    parts = """reward.parts=[
      {id: env},
      {id: format, weight: 0.1, kwargs: {pattern: "<answer>.*
</answer>"}}]"""
    config = load([ENV, parts])
    assert [part.id for part in config.reward.parts] == ["env", "format"]
    assert config.reward.parts[1].kwargs == {"pattern": "<answer>.*\n</answer>"}
    refuse("trainer.run_dir=runs/a\nb", match="cannot read the setting")
