"""Several environments in one configuration: what is refused, and who gets which estimator."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentrl.config.environments import credit_configs
from agentrl.config.load import from_yaml, load, to_dict
from agentrl.env.entries import environments, run_label
from agentrl.errors import ConfigError

TWO = "env.mix=[{id: guess_number, weight: 2}, {id: calculator, name: sums, kwargs: {digits: 2}}]"


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["env.mix=[{id: a, wieght: 2}]"], r"env.mix\[0\].wieght: .*did you mean 'weight'\?"),
        (["env.mix=[{id: a}, {id: b, weight: x}]"], r"env.mix\[1\].weight: .*float, got 'x'"),
        (["env.mix=[{id: a, weight: 0}]"], r"env.mix\[0\].weight=0.0: .*above 0"),
        (["env.mix=[{id: a, weight: -1}]"], r"env.mix\[0\].weight=-1.0: .*above 0"),
        (["env.mix=[{id: a, weight: nan}]"], r"env.mix\[0\].weight=nan: must be a finite"),
        (["env.mix=[{id: a, weight: inf}]"], r"env.mix\[0\].weight=inf: must be a finite"),
        (["env.mix=[{id: a}, {id: a}]"], r"holds 'a' more than once.*name: \.\.\."),
        (["env.mix=[{id: a}, {id: b, name: a}]"], r"holds 'a' more than once"),
        (["env.mix=[{id: a, name: ' '}]"], r"env.mix\[0\].name=' '"),
        (["env.mix=[{weight: 1}]"], r"env.mix\[0\].id is not set"),
        (["env.mix=[guess_number]"], r"must be a list of entries, env.mix=\[\{id: "),
        (["env.mix=guess_number"], r"must be a list of entries"),
        (["env.id=guess_number", TWO], r"env.id='guess_number' \(--env\) and env.mix together"),
        (["env.kwargs.level=1", TWO], r"env.kwargs=.*with env.mix: .*into its entry"),
        ([], r"env.id is not set: choose .*--env NAME.*env.mix="),
        (
            ["env.mix=[{id: a, algo: {advntage: rloo}}]"],
            r"env.mix\[0\].algo.advntage: .*'advantage'",
        ),
        (["env.mix=[{id: a, algo: {advantage: rlo}}]"], r"env.mix\[0\].algo.advantage='rlo'.*rloo"),
        (["env.mix=[{id: a, algo: {gamma: x}}]"], r"env.mix\[0\].algo.gamma: .*got 'x'"),
        (["env.mix=[{id: a, algo: {loss: vanilla}}]"], r"env.mix\[0\].algo.loss: .*takes no such"),
        (
            ["env.mix=[{id: a, algo: {advantage_kwargs: {x: 1}}}]"],
            r"env.mix\[0\].algo.advantage_kwargs.x: grpo takes no such argument",
        ),
        (
            ["env.mix=[{id: a, algo: {reward_weights: {outcome: 0, turn: 0, tool: 0}}}]"],
            r"env.mix\[0\].algo.reward_weights=.*every weight is 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(overrides)


def test_entries_of_a_mix_have_names_weights_and_seeds_of_their_own() -> None:
    config = load([TWO, "env.threads=3"])
    one, two = environments(config.env)
    assert (one.name, one.weight, one.config.id) == ("guess_number", 2.0, "guess_number")
    assert (two.name, two.weight, two.config.id) == ("sums", 1.0, "calculator")
    assert two.config.kwargs == {"digits": 2} and one.config.kwargs == {}
    assert [entry.config.threads for entry in (one, two)] == [3, 3], "hosting is common"
    assert [entry.namespace for entry in (one, two)] == ["guess_number", "sums"]
    assert run_label(config.env) == "guess_number+sums"


def test_one_environment_is_a_mix_of_one_and_keeps_its_seeds() -> None:
    (plain,) = environments(load(["env.id=guess_number"]).env)
    (mixed,) = environments(load(["env.mix=[{id: guess_number, weight: 5}]"]).env)
    assert (plain.name, plain.namespace) == (mixed.name, mixed.namespace) == ("guess_number", "")
    assert plain.config == mixed.config


def test_a_mix_comes_back_from_the_run_directory(tmp_path: Path) -> None:
    config = load([TWO])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)))
    assert from_yaml(path) == config
    assert load(["env.mix=[{id: calculator}]"], base=config).env.mix[0].id == "calculator"


def test_an_entry_changes_the_algorithm_for_itself_only() -> None:
    config = load(
        [
            "env.mix=[{id: a, algo: {reward_weights: {turn: 0.5}, advantage_kwargs: {normalize_std:"
            " false}}}, {id: b, algo: {advantage: rloo}}, {id: c}]",
            "algo.reward_weights.tool=2",
            "algo.advantage_kwargs.normalize_std=true",
        ]
    )
    found = credit_configs(config)
    assert list(found) == ["a", "b", "c"]
    # Weights are merged by name; what an entry does not name is as in algo.
    assert found["a"].reward_weights == {"outcome": 1.0, "turn": 0.5, "tool": 2.0}
    assert found["a"].advantage_kwargs == {"normalize_std": False}
    # Arguments of another estimator are not handed on.
    assert (found["b"].advantage, found["b"].advantage_kwargs) == ("rloo", {})
    assert found["b"].reward_weights["tool"] == 2.0
    assert (found["c"].advantage, found["c"].advantage_kwargs) == ("grpo", {"normalize_std": True})
    assert config.algo.advantage_kwargs == {"normalize_std": True}, "algo itself is left alone"


def test_a_run_with_one_environment_has_one_credit() -> None:
    config = load(["env.id=guess_number", "algo.gamma=null"])
    assert list(credit_configs(config)) == ["guess_number"]
