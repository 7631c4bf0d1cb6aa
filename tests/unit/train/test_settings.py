from __future__ import annotations

import pytest

from agentrl.errors import CheckpointError
from agentrl.train.settings import changed_settings, refuse_changed_settings

SAVED = {"actor": {"lr": 1e-3, "betas": [0.9, 0.95]}, "trainer": {"total_steps": 10, "seed": 0}}


def test_differences_are_named_by_their_dotted_key() -> None:
    current = {"actor": {"lr": 2e-3, "betas": [0.9, 0.95]}, "trainer": {"total_steps": 10}}
    assert changed_settings(SAVED, current) == {
        "actor.lr": (1e-3, 2e-3),
        "trainer.seed": (0, None),
    }
    assert changed_settings(SAVED, SAVED) == {}


def test_a_number_that_is_none_stays_the_same() -> None:
    def with_kwargs(nan: float) -> dict[str, object]:
        return {"kwargs": {"a": nan, "list": [1, [nan], {"b": nan}]}}

    assert changed_settings(with_kwargs(float("nan")), with_kwargs(float("nan"))) == {}
    assert set(changed_settings(with_kwargs(float("nan")), with_kwargs(0.0))) == {
        "kwargs.a",
        "kwargs.list",
    }


def test_settings_that_may_change_are_left_out() -> None:
    current = {"actor": {"lr": 1.0, "betas": []}, "trainer": {"total_steps": 20, "seed": 0}}
    assert changed_settings(SAVED, current, free=("trainer.total_steps", "actor.")) == {}
    # A name without a dot at its end is one key, not a prefix.
    assert set(changed_settings(SAVED, current, free=("actor", "trainer.total_steps"))) == {
        "actor.lr",
        "actor.betas",
    }


def test_a_change_is_refused_with_both_values_and_the_way_out() -> None:
    current = {**SAVED, "actor": {"lr": 2e-3, "betas": [0.9, 0.95]}}
    with pytest.raises(CheckpointError, match=r"actor\.lr was 0\.001 .* 0\.002.*force_resume"):
        refuse_changed_settings(SAVED, current)
    refuse_changed_settings(SAVED, SAVED)


def test_what_was_empty_and_is_filled_is_compared_entry_by_entry() -> None:
    empty, filled = {"kwargs": {}}, {"kwargs": {"port": 1, "dtype": "half"}}
    free = ("kwargs.port",)
    for saved, current in ((empty, filled), (filled, empty)):
        assert list(changed_settings(saved, current, free=free)) == ["kwargs.dtype"]
    assert not changed_settings(empty, {"kwargs": {"port": 1}}, free=free)
    assert list(changed_settings(empty, {"kwargs": None})) == ["kwargs"]
