from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent.limits import LoopLimits
from agentrl.errors import ConfigError
from agentrl.rollout.fit_limits import LENGTHS, as_settings, fitted, refuse_beyond_positions


def lengths(context: int, response: int, turn: int) -> LoopLimits:
    return LoopLimits(
        max_context_tokens=context, max_response_tokens=response, max_turn_tokens=turn
    )


def test_the_defaults_shrink_to_a_model_of_1024_positions_with_room_for_a_prompt() -> None:
    assert as_settings(fitted(LoopLimits(), positions=1024)) == (
        "rollout.max_context_tokens=1024 rollout.max_response_tokens=512 "
        "rollout.max_turn_tokens=256"
    )
    assert fitted(LoopLimits(), positions=32768) == LoopLimits()
    assert fitted(LoopLimits(), positions=None) == LoopLimits()


def test_what_a_user_set_stays_and_the_rest_follows_it() -> None:
    mine = fitted(lengths(300, 1024, 256), given=["max_context_tokens"])
    assert mine == lengths(300, 150, 150)
    kept = fitted(lengths(2048, 1024, 256), given=LENGTHS, positions=1024)
    assert kept == lengths(2048, 1024, 256)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5000), st.integers(2, 5000), st.integers(2, 5000), st.integers(2, 5000))
def test_whatever_is_refused_is_told_settings_that_are_not(
    context: int, response: int, turn: int, positions: int
) -> None:
    limits = lengths(context, response, turn)
    try:
        refuse_beyond_positions(limits, positions, source="mine")
    except ConfigError as error:
        told = str(error).rpartition(": ")[2]
        values = {name: int(value) for name, value in (item.split("=") for item in told.split())}
        limits = lengths(*(values[f"rollout.{name}"] for name in LENGTHS))
        refuse_beyond_positions(limits, positions, source="mine")
        assert limits.max_turn_tokens <= limits.max_response_tokens
    assert limits.max_response_tokens < limits.max_context_tokens <= positions


def test_a_refusal_names_the_model_its_positions_and_what_passes_them() -> None:
    with pytest.raises(ConfigError, match=r"'mine' has 128 positions.*max_context_tokens=129"):
        refuse_beyond_positions(lengths(129, 64, 64), 128, source="mine")
    with pytest.raises(ConfigError, match=r"'mine' has 128 positions.*max_response_tokens=128"):
        refuse_beyond_positions(lengths(128, 128, 64), 128, source="mine")
    refuse_beyond_positions(lengths(10**6, 64, 64), None, source="mine")
