"""Proportions of a mix: exact, pure, and the same for a run that was resumed."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.mix import MixedStream, MixSchedule
from agentrl.rollout.tasks import TaskStream
from agentrl.types import Task

WHOLE = st.lists(st.integers(1, 12), min_size=1, max_size=6)
ANY = st.lists(
    st.floats(1e-3, 1e3, allow_nan=False).map(lambda value: round(value, 3)).filter(bool),
    min_size=1,
    max_size=6,
)


def parties(weights: list[float], length: int, start: int = 0) -> list[int]:
    schedule = MixSchedule(weights)
    return [schedule.at(start + offset)[0] for offset in range(length)]


@given(weights=ANY)
@settings(max_examples=60, deadline=None)
def test_no_environment_is_ever_a_whole_prompt_away_from_its_share(weights: list[float]) -> None:
    exact = [Fraction(repr(float(weight))) for weight in weights]
    counts = [0] * len(weights)
    for position, party in enumerate(parties(weights, 200)):
        counts[party] += 1
        for count, weight in zip(counts, exact, strict=True):
            assert abs(count - weight / sum(exact) * (position + 1)) < 1


@given(weights=WHOLE, start=st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_every_window_of_a_period_holds_the_weights_exactly(weights: list[int], start: int) -> None:
    schedule = MixSchedule([float(weight) for weight in weights])
    window = Counter(parties([float(w) for w in weights], schedule.period, start))
    scale = sum(weights) // schedule.period
    assert [window[i] * scale for i in range(len(weights))] == weights


@given(weights=ANY, indices=st.lists(st.integers(0, 3000), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_a_position_depends_on_nothing_but_itself(weights: list[float], indices: list[int]) -> None:
    used = MixSchedule(weights)
    assert [used.at(i) for i in indices] == [MixSchedule(weights).at(i) for i in indices]


@given(weights=ANY)
@settings(max_examples=30, deadline=None)
def test_the_positions_of_an_environment_are_counted_without_a_gap(weights: list[float]) -> None:
    schedule, seen = MixSchedule(weights), Counter[int]()
    for index in range(150):
        party, before = schedule.at(index)
        assert before == seen[party]
        seen[party] += 1


def test_weights_are_the_numbers_as_they_are_written() -> None:
    assert MixSchedule([0.1, 0.2]).period == 3  # 0.1 + 0.2 != 0.3 in binary
    assert MixSchedule([50.0, 100.0]).period == 3
    assert parties([1.0, 1.0], 4) == [0, 1, 0, 1]


def stream(names_and_sizes: dict[str, int], weights: dict[str, float]) -> MixedStream:
    return MixedStream(
        {
            name: TaskStream([Task(id=str(i), data={}) for i in range(size)], seed=3, source=name)
            for name, size in names_and_sizes.items()
        },
        weights,
    )


def test_a_mix_of_one_is_that_environment() -> None:
    tasks = [Task(id=str(i), data={}) for i in range(5)]
    alone = TaskStream(tasks, seed=3, source="a")
    mixed = stream({"a": 5}, {"a": 0.7})
    for index in range(17):
        ours, theirs = mixed.at(index), alone.at(index)
        assert (ours.index, ours.epoch, ours.task) == (theirs.index, theirs.epoch, theirs.task)
        assert ours.env == "a"


def test_every_environment_has_epochs_of_its_own() -> None:
    mixed = stream({"a": 4, "b": 2}, {"a": 2, "b": 1})
    prompts = list(islice(mixed.starting_at(0), 12))
    assert [prompt.index for prompt in prompts] == list(range(12))
    for name, size in (("a", 4), ("b", 2)):
        own = [prompt for prompt in prompts if prompt.env == name]
        for epoch in range(2):
            ids = {prompt.task.id for prompt in own[epoch * size : (epoch + 1) * size]}
            assert ids == {str(i) for i in range(size)}
            assert {prompt.epoch for prompt in own[epoch * size : (epoch + 1) * size]} == {epoch}


def test_a_resumed_stream_goes_on_as_if_nothing_had_happened() -> None:
    sizes, weights = {"a": 7, "b": 3, "c": 2}, {"a": 0.5, "b": 0.3, "c": 0.25}
    whole = list(islice(stream(sizes, weights).starting_at(0), 60))
    assert list(islice(stream(sizes, weights).starting_at(23), 37)) == whole[23:]
