"""What is kept of every token that vLLM's core puts out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.rollout.engines.vllm_requests import noise_seed
from agentrl.rollout.engines.vllm_turns import TurnTable
from agentrl.rollout.engines.vllm_wire import Turn


class FinishReason:
    """As vLLM's: an integer that prints as a word."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __str__(self) -> str:
        return self.word


def output(
    name: str,
    ids: list[int],
    *,
    finish: str | None = None,
    num_cached: int | None = None,
    logprobs: list[float] | None = None,
) -> Any:
    """Return an output of one step; further columns hold what was not sampled."""
    rows = np.full((len(ids), 2), -99.0, dtype=np.float32)
    rows[:, 0] = logprobs if logprobs is not None else [-float(token) for token in ids]
    return SimpleNamespace(
        request_id=name,
        new_token_ids=ids,
        new_logprobs=SimpleNamespace(logprobs=rows) if ids else None,
        prefill_stats=None if num_cached is None else SimpleNamespace(num_cached_tokens=num_cached),
        finish_reason=None if finish is None else FinishReason(finish),
    )


def contents(turn: Turn) -> tuple[list[int], list[float]]:
    ids = np.frombuffer(turn.ids, dtype=np.int32).tolist()
    return ids, np.frombuffer(turn.logprobs, dtype=np.float32).tolist()


def test_turns_of_interleaved_steps_come_out_whole_when_they_end() -> None:
    table = TurnTable()
    first, second = table.begin(1), table.begin(2)
    assert table.take([output(first, [5], num_cached=32), output(second, [6], num_cached=0)]) == []
    assert table.take([output(second, [7, 8]), output(first, [9])]) == []
    (ended,) = table.take([output(first, [3], finish="stop"), output(second, [4])])
    assert contents(ended) == ([5, 9, 3], [-5.0, -9.0, -3.0])
    assert (ended.key, ended.reason, ended.num_cached_tokens) == (1, "stop", 32)
    (last,) = table.take([output(second, [2], finish="length")])
    assert contents(last) == ([6, 7, 8, 4, 2], [-6.0, -7.0, -8.0, -4.0, -2.0])
    assert (last.reason, len(table)) == ("length", 0)


def test_an_aborted_turn_keeps_its_tokens_and_ignores_those_on_their_way() -> None:
    table = TurnTable()
    name = table.begin(7)
    table.take([output(name, [1])])
    (aborted,) = table.abort(table.names([7, 8]))
    assert (aborted.reason, contents(aborted)) == ("abort", ([1], [-1.0]))
    assert table.take([output(name, [2], finish="length")]) == []


def test_a_turn_that_vllm_lost_is_an_error_and_no_answer() -> None:
    table = TurnTable()
    with pytest.raises(RuntimeError, match="ended a request with 'error'"):
        table.take([output(table.begin(1), [], finish="error")])


def test_a_turn_that_goes_on_has_noise_of_its_own() -> None:
    seeds = {noise_seed(11, index, positional=False) for index in (0, 1, 2, 100)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert noise_seed(11, 0, positional=False) == 11
    assert noise_seed(11, 100, positional=True) == 11  # the position tells the tokens apart
