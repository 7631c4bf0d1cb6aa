from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.config.load import load
from agentrl.errors import ConfigError, ModelError
from agentrl.limits import within_positions
from agentrl.rollout.config import RolloutConfig


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A directory that says of a model that it has 1024 positions."""
    text = json.dumps({"model_type": "llama", "max_position_embeddings": 1024})
    (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


def bounded(*overrides: str) -> tuple[RolloutConfig, list[str]]:
    said: list[str] = []
    given = ["env.id=guess_number", *overrides]
    return within_positions(load(given), given, announce=said.append).rollout, said


def test_defaults_are_bounded_by_the_positions_and_that_is_said_once(small: str) -> None:
    rollout, said = bounded(f"model.path={small}")
    assert (rollout.max_context_tokens, rollout.max_response_tokens) == (1024, 512)
    assert len(said) == 1 and "1024 positions: rollout.max_context_tokens=1024" in said[0]


@pytest.mark.parametrize("form", ["rollout.max_context_tokens=2048", "rollout={{{}}}"])
def test_what_the_user_set_is_refused_with_a_line_that_works(small: str, form: str) -> None:
    path = f"model.path={small}"
    with pytest.raises(ConfigError, match="2048") as caught:
        bounded(path, form.format("max_context_tokens: 2048"))
    told = str(caught.value).rpartition(": ")[2].split()
    rollout, said = bounded(path, *told)
    assert rollout.max_context_tokens == 1024 and not said


def test_an_answer_that_the_user_set_is_not_cut_to_the_model(small: str) -> None:
    with pytest.raises(ConfigError, match=r"max_response_tokens=1024 .*work together: \S+=1024"):
        bounded(f"model.path={small}", "rollout.max_response_tokens=1024")


def test_one_given_length_is_enough(small: str) -> None:
    rollout, said = bounded(f"model.path={small}", "rollout.max_context_tokens=1024")
    assert rollout.max_response_tokens == 512 and not said


def test_the_embedded_model_is_bounded_too_and_a_model_that_is_not_there_is_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="1024 positions"):
        bounded("rollout.max_context_tokens=1025")
    with pytest.raises(ModelError, match="no such directory"):
        bounded(f"model.path={tmp_path}/none")
