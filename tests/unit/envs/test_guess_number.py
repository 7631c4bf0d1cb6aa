from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from agentrl_envs.guess_number import GuessNumber
from agentrl_envs.guess_number.env import GuessRubric, num_guesses, parse_guess, prompt
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.base import Episode
from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Action, Task


def say(text: str) -> Action:
    return Action(text=text, content=text)


def game(low: int, high: int, secret: int, *, turn_reward: float = 0.0) -> GuessNumber:
    env = GuessNumber(turn_reward)
    task = Task(id="t", data={"low": low, "high": high, "secret": secret})
    assert env.reset(options={"task": task})[0] == prompt(low, high)
    return env


def test_the_environment_keeps_its_contract() -> None:
    assert asyncio.run(check_env(EnvConfig(id="guess_number"))) == []


def test_splits_share_no_task_and_the_test_split_has_unseen_ranges() -> None:
    env = GuessNumber()
    tasks = {split: env.tasks(split) for split in ("train", "val", "test")}
    assert len(tasks["test"]) >= 256 and len(tasks["val"]) >= 64
    keys = {split: {tuple(t.data.values()) for t in members} for split, members in tasks.items()}
    assert not keys["train"] & keys["test"]
    assert not keys["val"] & (keys["train"] | keys["test"])
    trained_ranges = {key[:2] for key in keys["train"] | keys["val"]}
    for task in tasks["test"]:
        is_new = (task.data["low"], task.data["high"]) not in trained_ranges
        assert is_new == (task.tags["range"] == "unseen")
    with pytest.raises(EnvError, match="dev"):
        env.tasks("dev")


def test_answers_say_where_the_number_is() -> None:
    env = game(42, 48, 45)
    assert env.step(say("43"))[0] == "higher"
    assert env.step(say("I guess 47"))[0] == "lower"
    observation, reward, terminated, truncated, info = env.step(say("45"))
    assert (observation, terminated, truncated) == ("correct", True, False)
    assert reward == 0.0 and info["solved"]
    score = GuessRubric().score(
        Episode(task=Task(id="t", data={}), messages=[], turns=[], info=info, sandboxes=None)  # type: ignore[arg-type]
    )
    assert score.reward == 1.0 and score.success


def test_an_episode_ends_when_the_guesses_are_used_up() -> None:
    env = game(40, 44, 44)
    ends = [env.step(say("40"))[2] for _ in range(num_guesses(5))]
    assert ends == [False, False, True]


@pytest.mark.parametrize("text", ["", "no", "41 or 44", "4" * 5000, "forty"])
def test_a_turn_without_one_number_costs_a_guess(text: str) -> None:
    env = game(40, 44, 44)
    observation, _, terminated, _, info = env.step(say(text))
    assert observation == "Say one number from 40 to 44." and not terminated
    assert not info["solved"]
    assert [env.step(say("40"))[2] for _ in range(2)] == [False, True]


@given(low=st.integers(1, 90), width=st.integers(2, 60), offset=st.integers(0, 59))
def test_halving_always_finds_the_number(low: int, width: int, offset: int) -> None:
    high, secret = low + width - 1, low + offset % width
    env, left, solved = game(low, high, secret), range(low, high + 1), False
    for _ in range(num_guesses(width)):
        guess = left[len(left) // 2]
        observation, _, done, _, info = env.step(say(str(guess)))
        solved = info["solved"]
        if done:
            break
        left = range(guess + 1, left.stop) if observation == "higher" else range(left.start, guess)
    assert solved


@given(guesses=st.lists(st.integers(0, 99), min_size=4, max_size=4), secret=st.integers(40, 49))
def test_turn_rewards_cannot_be_farmed(guesses: list[int], secret: int) -> None:
    env = game(40, 49, secret, turn_reward=0.5)
    rewards, solved = [], False
    for guess in guesses:
        _, reward, done, _, info = env.step(say(str(guess)))
        rewards.append(reward)
        solved = info["solved"]
        if done:
            break
    assert all(reward >= 0 for reward in rewards)
    assert sum(rewards) <= 0.5 + 1e-9
    if solved:
        assert sum(rewards) == pytest.approx(0.5)


def test_a_negative_turn_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="turn_reward"):
        GuessNumber(turn_reward=-1.0)


def test_the_anchor_is_what_is_known() -> None:
    one, other = game(40, 49, 48), game(40, 49, 49)
    for env in (one, other):
        env.step(say("45"))
    assert one.anchor() == other.anchor() == "46-49:3"


def test_demonstrations_are_reproducible_and_win_about_half() -> None:
    env = GuessNumber()
    first, again = (list(itertools.islice(env.demonstrations("train", 3), 2000)) for _ in range(2))
    assert [demo.messages for demo in first] == [demo.messages for demo in again]
    rate = sum(demo.metadata["success"] for demo in first) / len(first)
    assert 0.45 < rate < 0.65
    train = {task.id for task in env.tasks("train")}
    assert all(demo.task.id in train for demo in first)


@given(st.integers(0, 999_999), st.sampled_from(["{}", " {} ", "is it {}?", "{}."]))
def test_one_number_in_any_words_is_a_guess(number: int, words: str) -> None:
    assert parse_guess(words.format(number)) == number


def test_a_random_policy_does_what_the_readme_says() -> None:
    rng, env, won = random.Random(0), GuessNumber(), 0
    tasks = list(env.tasks("test")) * 3
    for task in tasks:
        env.reset(options={"task": task})
        done, solved = False, False
        while not done:
            guess = rng.randint(task.data["low"], task.data["high"])
            _, _, done, _, info = env.step(say(str(guess)))
            solved = info["solved"]
        won += solved
    assert won / len(tasks) == pytest.approx(0.40, abs=0.05)
