"""The score in a judge's answer: read whole or not at all, in bounded time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RewardError
from agentrl.reward.verdict import NoScore, ScoreReader


def read(text: str, pattern: str | None = None) -> float:
    reader = ScoreReader(pattern, low=-10.0, high=10.0)
    return asyncio.run(asyncio.wait_for(reader.read(text), 60))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 5", 5.0),
        ("score = 2.5", 2.5),
        ("Score: 9\nBut no.\n**Score: 2.5**", 2.5),
        ("**Score:** 7.", 7.0),
        ("__Score__: **7**", 7.0),
        ("## Score:\n\n7\n", 7.0),
        ("Score: -3", -3.0),
        ("Score: .5", 0.5),
        ("Score: 1e1", 10.0),
        ("Score: 7/10", 7.0),
        ("Score: 7 out of 10.", 7.0),
        ("Score: 7 (good, but see above)", 7.0),
        ("Score: 4\r\n> thanks", 4.0),
        ("x" * 100_000 + "\nScore: 3", 3.0),
    ],
)
def test_a_score_line_is_read(text: str, score: float):
    assert read(text) == score


@pytest.mark.parametrize(
    "text",
    ["", "I would rather not say.", "Score: none", "Score: 1e999", "Score: -1e999", "Score: nan",
     "Score: 3.5.2", "Score: 1,000", "Score: 5x", "Score: 7/100", "Score: 7 out of 100",
     "Score: 7%", "Score: 7 %", "Score: 7-8", "Score: 7 – 8", "Score: \u22123", "Score: 0x7",
     "Score: 1_0", "Score: \u0665", "Score: 11", "Score: 5²", "Score: " + "9" * 5000,
     "Score: 7/", "Score: 9\nScore: 1e999", "underscore: 5"],
    ids=lambda text: repr(text[:24]),
)  # fmt: skip
def test_anything_else_is_no_score_and_never_a_part_of_a_number(text: str):
    with pytest.raises(NoScore):
        read(text)


@given(st.floats(-10, 10))
def test_every_number_comes_back_as_it_was_written(value: float):
    assert read(f"Score: {value!r}") == value


@pytest.mark.parametrize("piece", ["\n", "!\n", "score:", "score:\n", "*", "_", "score ", " "])
def test_a_long_answer_without_a_score_is_read_without_backtracking(piece: str):
    # A search that is quadratic takes hours for this.
    with pytest.raises(NoScore):
        read(piece * (1_000_000 // len(piece)) + "x")


def test_a_users_pattern_has_a_limit_of_time_and_the_event_loop_goes_on():
    async def main() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        beating = asyncio.create_task(beat())
        reader = ScoreReader(r"(?:a|a)+b(\d)", low=0.0, high=10.0)
        with pytest.raises(RewardError, match=r"the pattern '.*took more than 1 s.*60 characters"):
            await reader.read("a" * 60)
        beating.cancel()
        return beats

    assert asyncio.run(asyncio.wait_for(main(), 60)) > 3


def test_a_users_pattern_decides_with_its_last_match():
    assert read("<s>1</s><s>2</s>", r"<s>(\d)</s>") == 2.0
    assert read("<s>1</s>", r"<s>(\d)(</s>)") == 1.0
    for text in ("<s>x</s>", "<s>99</s>", "<s>nan</s>", "<s></s>", "none"):
        with pytest.raises(NoScore):
            read(text, r"<s>(.*?)</s>")
