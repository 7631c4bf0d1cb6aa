"""A turn that several engines take part in loses no token and doubles none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EngineError
from agentrl.rollout.serving.turn import Turn
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason

STOP = 9


def request(max_tokens: int = 6, *, first_index: int = 0) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=(STOP,), seed=3, first_index=first_index
    )
    return GenerateRequest(prompt_ids=(1, 2), sampling=sampling, session_id="s")


def part(ids: list[int], reason: StopReason = StopReason.ABORT, *, version: int = 0) -> Generation:
    return Generation(
        ids=ids,
        logprobs=[-float(token) for token in ids],
        policy_version=[version] * len(ids),
        stop_reason=reason,
        num_cached_tokens=1,
    )


def test_what_is_asked_next_is_what_is_missing() -> None:
    turn = Turn(request(first_index=4))
    turn.interrupted = True
    turn.add(part([20, 21]))
    asked = turn.next_request()
    assert asked.prompt_ids == [1, 2, 20, 21]
    assert asked.sampling.max_tokens == 4
    assert asked.sampling.first_index == 6
    assert asked.sampling.seed == 3 and asked.session_id == "s"


def test_versions_and_logprobs_are_stitched() -> None:
    turn = Turn(request())
    turn.interrupted = True
    turn.add(part([20, 21], version=1))
    turn.add(part([22, STOP], StopReason.STOP, version=2))
    found = turn.generation()
    assert found.ids == [20, 21, 22, STOP]
    assert found.logprobs == [-20, -21, -22, -STOP]
    assert found.policy_version == [1, 1, 2, 2]
    assert found.stop_reason is StopReason.STOP
    assert found.num_cached_tokens == 1  # of the prompt, not of the turn's own tokens


def test_an_abort_of_the_callers_ends_the_turn_although_an_update_interrupts_it_too() -> None:
    turn = Turn(request())
    turn.interrupted = turn.aborted = True
    turn.add(part([20]))
    assert turn.generation().stop_reason is StopReason.ABORT
    assert turn.generation().ids == [20]


@pytest.mark.parametrize(
    ("ids", "reason"), [([20, STOP], StopReason.STOP), ([20] * 6, StopReason.LENGTH)]
)
def test_an_interruption_that_came_too_late_changes_nothing(
    ids: list[int], reason: StopReason
) -> None:
    turn = Turn(request())
    turn.interrupted = True
    turn.add(part(ids))
    assert turn.generation().stop_reason is reason


def test_what_a_lost_engine_had_streamed_is_kept() -> None:
    turn = Turn(request())
    turn.lost(part([20, 21]))
    assert not turn.ended
    assert turn.next_request().prompt_ids == [1, 2, 20, 21]
    turn.lost(None)
    assert turn.next_request().sampling.first_index == 2
    assert turn.num_lost == 2


def test_older_weights_after_newer_ones_are_refused() -> None:
    turn = Turn(request())
    turn.interrupted = True
    turn.add(part([20], version=2))
    with pytest.raises(EngineError, match="older weights"):
        turn.add(part([21, STOP], StopReason.STOP, version=1))


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(EngineError, match="7 tokens where at most 6"):
        Turn(request()).add(part([20] * 7, StopReason.LENGTH))


@given(cuts=st.lists(st.integers(0, 5), max_size=6), total=st.integers(1, 12))
def test_any_cuts_give_the_same_turn(cuts: list[int], total: int) -> None:
    whole = list(range(100, 100 + total))
    turn = Turn(request(total))
    for version, cut in enumerate(cuts):
        if turn.ended:
            break
        begin = turn.next_request().sampling.first_index
        turn.interrupted = True
        turn.add(part(whole[begin : begin + cut], version=version))
    if not turn.ended:
        begin = turn.next_request().sampling.first_index
        turn.add(part(whole[begin:], StopReason.LENGTH, version=len(cuts)))
    found = turn.generation()
    assert found.ids == whole
    assert found.policy_version == sorted(found.policy_version)
    assert found.stop_reason is StopReason.LENGTH
