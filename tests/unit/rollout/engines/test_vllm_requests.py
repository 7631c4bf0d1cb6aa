"""What goes to vLLM and comes back, as far as it can be told without one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.errors import EngineError
from agentrl.rollout.engines.vllm_requests import check_turn, read_turn
from agentrl.rollout.engines.vllm_wire import Turn
from agentrl.types import GenerateRequest, SamplingParams, StopReason


def turn(*logprobs: float) -> Turn:
    return Turn(
        key=1,
        ids=np.array([5, 6], dtype=np.int32).tobytes(),
        logprobs=np.array(logprobs, dtype=np.float32).tobytes(),
        reason="length",
        num_cached_tokens=0,
    )


def test_a_turn_has_its_tokens_and_the_version_it_was_sampled_from() -> None:
    found = read_turn(turn(-1.0, 0.0), session="s", version=3)
    assert (found.ids, found.logprobs) == ([5, 6], [-1.0, 0.0])
    assert found.policy_version == [3, 3] and found.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("logprobs", [(-1.0, math.nan), (-math.inf, -1.0), (-1.0,), ()])
def test_a_turn_without_a_finite_logprob_for_each_token_is_refused(logprobs: tuple[float]) -> None:
    with pytest.raises(EngineError, match="'s': vLLM sampled 2 tokens with . finite.*version 3"):
        read_turn(turn(*logprobs), session="s", version=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.001}, "at 0.01 to 2.0, and at 0"),
        ({"temperature": 2.5}, "at 0.01 to 2.0, and at 0"),
        ({"max_tokens": 2.5}, r"max_tokens=2.5 \(a whole number"),
        ({"max_tokens": "3"}, r"max_tokens='3' \(a whole number"),
        ({"seed": None}, r"seed=None \(a whole number"),
    ],
)
def test_sampling_that_vllm_would_not_do_as_asked_is_refused(
    wrong: dict[str, Any], message: str
) -> None:
    sampling = SamplingParams(max_tokens=2)
    request = GenerateRequest(prompt_ids=[1], sampling=sampling, session_id="s")
    for temperature in (0.0, 0.01, 2.0):
        sampled = replace(sampling, temperature=temperature)
        check_turn(replace(request, sampling=sampled), max_context=9, vocab_size=9)
    with pytest.raises(EngineError, match=message):
        check_turn(
            replace(request, sampling=replace(sampling, **wrong)), max_context=9, vocab_size=9
        )
