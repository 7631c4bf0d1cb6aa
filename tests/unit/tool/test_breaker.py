"""The circuit breaker of a tool: when it opens, who may try, when the run stops."""

from __future__ import annotations

import pickle

import pytest

from agentrl.errors import TrainingError
from agentrl.tool.breaker import BreakerConfig, BreakerState, CircuitBreaker, CircuitOpen

CONFIG = BreakerConfig(max_failures=3, cooldown_s=5.0, give_up_s=20.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker("search", CONFIG, clock=clock), clock


def fail(breaker: CircuitBreaker) -> None:
    breaker.failed("ConnectionRefusedError: no", is_probe=breaker.admit())


def opened() -> tuple[CircuitBreaker, Clock]:
    breaker, clock = make()
    for _ in range(3):
        fail(breaker)
    return breaker, clock


def test_it_opens_after_failures_in_a_row_and_says_which():
    breaker, _ = make()
    fail(breaker)
    fail(breaker)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    with pytest.raises(CircuitOpen, match=r"last 3 calls of search .* ConnectionRefusedError"):
        breaker.admit()
    assert (breaker.num_opened, breaker.num_refused) == (1, 1)


def test_an_answer_between_failures_begins_the_row_anew():
    breaker, _ = make()
    for _ in range(5):
        fail(breaker)
        fail(breaker)
        breaker.admit()
        breaker.answered()
    assert breaker.state is BreakerState.CLOSED


def test_after_the_cooldown_one_call_tries_and_the_others_still_fail():
    breaker, clock = opened()
    clock.now_s = 5.0
    assert breaker.admit() is True
    assert breaker.state is BreakerState.HALF_OPEN
    with pytest.raises(CircuitOpen):
        breaker.admit()
    breaker.answered()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit() is False


def test_a_try_that_fails_waits_as_long_again():
    breaker, clock = opened()
    clock.now_s = 5.0
    fail(breaker)
    clock.now_s = 9.9
    with pytest.raises(CircuitOpen):
        breaker.admit()
    clock.now_s = 10.0
    assert breaker.admit() is True
    assert breaker.num_opened == 1


def test_a_try_that_nobody_waits_for_leaves_the_place_to_another():
    breaker, clock = opened()
    clock.now_s = 5.0
    breaker.abandoned(is_probe=breaker.admit())
    assert breaker.admit() is True


def test_failures_of_calls_made_before_it_opened_do_not_speak_for_the_try():
    breaker, clock = make()
    early = [breaker.admit() for _ in range(8)]
    for is_probe in early[:4]:
        breaker.failed("reset", is_probe=is_probe)
    clock.now_s = 5.0
    assert breaker.admit() is True
    for is_probe in early[4:]:
        breaker.failed("reset", is_probe=is_probe)
    assert breaker.state is BreakerState.HALF_OPEN


def test_the_run_stops_where_nothing_answers_for_long():
    breaker, clock = opened()
    for clock.now_s in (5.0, 10.0, 15.0):
        fail(breaker)
    clock.now_s = 20.0
    with pytest.raises(TrainingError, match=r"'search' has not answered for 20 s.*give_up_s"):
        fail(breaker)


def test_its_errors_survive_a_process_boundary():
    breaker, _ = opened()
    with pytest.raises(CircuitOpen) as caught:
        breaker.admit()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_it_tells_how_long_it_leaves_the_tool_alone():
    breaker, clock = opened()
    assert breaker.cooling_s == 5.0
    clock.now_s = 3.0
    assert breaker.cooling_s == 2.0
    clock.now_s = 9.0
    assert breaker.cooling_s == 0.0
    breaker.admit()
    assert breaker.cooling_s == 0.0
    breaker.answered()
    assert breaker.cooling_s == 0.0
