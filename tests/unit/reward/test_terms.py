"""Length and format terms."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.base import Episode
from agentrl.errors import ConfigError, RegistryError, RewardError
from agentrl.reward.part import Part
from agentrl.reward.terms import Format, Overlong
from agentrl.testing import FakeSandboxes
from agentrl.types import StopReason, Task, Turn


def episode_of(num_tokens: int) -> Episode:
    turn = Turn(index=0, segment=0, start=5, end=5 + num_tokens, stop_reason=StopReason.STOP)
    return Episode(
        task=Task(id="t", data={}), messages=[], turns=[turn], info={}, sandboxes=FakeSandboxes()
    )


def punishment(num_tokens: int, **how: Any) -> float:
    return asyncio.run(Overlong(**how)(episode_of(num_tokens)))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0)]
)
def test_the_punishment_sets_in_at_the_buffer_and_is_whole_at_the_limit(num_tokens, expected):
    how = {"max_response_tokens": 100, "buffer_tokens": 20, "penalty": 2.0}
    assert punishment(num_tokens, **how) == pytest.approx(expected)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 500), st.floats(0, 10))
def test_the_punishment_is_between_zero_and_the_penalty_and_grows(limit, buffer, length, penalty):
    buffer, length = min(buffer, limit), min(length, limit)
    how = {"max_response_tokens": limit, "buffer_tokens": buffer, "penalty": penalty}
    now = punishment(length, **how)
    assert -penalty * (1 + 1e-9) <= now <= 0.0
    assert now <= punishment(max(length - 1, 0), **how)


def test_tokens_of_all_turns_and_of_the_parent_of_a_branch_count(make_episode):
    episode = make_episode("a", "b", "c", tokens_per_turn=30)
    assert episode.num_sampled_tokens == 90
    episode.num_inherited_tokens = 10
    overlong = Overlong(max_response_tokens=100, buffer_tokens=50)
    assert asyncio.run(overlong(episode)) == -1.0


@pytest.mark.parametrize(
    "how",
    [{"buffer_tokens": 0}, {"buffer_tokens": 101}, {"buffer_tokens": 5, "penalty": -1.0},
     {"buffer_tokens": 5, "penalty": math.inf}],
)  # fmt: skip
def test_a_punishment_that_cannot_work_is_refused(how):
    with pytest.raises(ConfigError, match="overlong"):
        Overlong(max_response_tokens=100, **how)


def test_a_pattern_is_searched_in_the_last_turn_or_in_all(make_episode):
    episode = make_episode("<a>1</a>", "nothing", "<a>\n2</a>")
    assert Format(r"<a>.*</a>")(episode) == 1.0
    assert Format(r"\A<a>\d</a>\Z")(episode) == 0.0
    assert Format(r"<a>.*</a>", turns="all")(episode) == pytest.approx(2 / 3)
    assert Format("x")(make_episode()) == 0.0


def short(text: str) -> bool:
    return len(text) < 5


def test_a_predicate_takes_the_place_of_a_pattern(make_episode):
    assert Format(predicate=short)(make_episode("abc")) == 1.0
    assert Format(predicate="keyword:iskeyword")(make_episode("while")) == 1.0
    with pytest.raises(RewardError, match="must return a bool"):
        Format(predicate=lambda text: 1)(make_episode("abc"))  # pyright: ignore


def test_a_pattern_that_backtracks_without_end_is_an_error_and_not_a_miss(make_episode):
    part = Part("format", Format(r"(a|aa)+$"), timeout_s=30)
    with pytest.raises(RewardError, match="reward part 'format'.*backtrack less"):
        asyncio.run(part.grade(make_episode("a" * 200 + "b")))


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({}, ConfigError, "either a pattern or a predicate"),
        ({"pattern": "x", "predicate": short}, ConfigError, "either"),
        ({"pattern": "(x"}, ConfigError, "pattern='\\(x'"),
        ({"pattern": "x", "turns": "first"}, ConfigError, "'last' or 'all'"),
        ({"predicate": "json:no_such"}, RegistryError, "no_such"),
        ({"predicate": "json:__name__"}, ConfigError, "function of the text"),
    ],
)
def test_a_format_that_cannot_be_checked_is_refused(how: Any, kind, message):
    with pytest.raises(kind, match=message):
        Format(**how)


def test_terms_travel_to_the_process_of_an_environment(make_episode):
    copy = pickle.loads(pickle.dumps(Format(r"\d")))
    assert copy(make_episode("4")) == 1.0
