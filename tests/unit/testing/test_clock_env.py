"""The environment of the token clock: latencies of a table, letters, rewards by seed."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.testing.clock_env import ClockEnv
from agentrl.testing.virtual_time import run_virtual
from agentrl.types import Action

ACTION = Action(text="x", content="x")


def play(env: ClockEnv, seed: int) -> tuple[list[float], float]:
    """Return when each turn was answered, and what the episode earned."""

    async def main() -> tuple[list[float], float]:
        (task, *_) = env.tasks("train")
        await env.reset(seed=seed, options={"task": task})
        times, earned, done = list[float](), 0.0, False
        while not done:
            _, reward, done, _, _ = await env.step(ACTION)
            earned += reward
            times.append(asyncio.get_running_loop().time())
        return times, earned

    return run_virtual(main())


def test_answers_come_after_the_latency_of_seed_and_turn() -> None:
    env = ClockEnv(num_turns=3)
    times, earned = play(env, seed=5)
    expected = [env.latency_s(5, turn) for turn in range(3)]
    assert times == pytest.approx([sum(expected[: turn + 1]) for turn in range(3)])
    assert earned == env.reward(5) and 0 < earned < 1
    assert play(env, seed=5) == (times, earned) != play(env, seed=6)


def test_latencies_have_a_long_tail_up_to_the_deadline_of_the_tool() -> None:
    env = ClockEnv(latency_median_s=0.05, latency_p99_s=3.0, latency_limit_s=4.0)
    found = sorted(env.latency_s(seed, 0) for seed in range(4000))
    assert found[2000] == pytest.approx(0.05, rel=0.15)
    assert found[3960] == pytest.approx(3.0, rel=0.3)
    assert found[-1] == 4.0
    assert play(ClockEnv(latency_median_s=0.0), seed=1)[0] == [0.0, 0.0]


def test_tasks_are_for_training_and_have_letters_of_their_own() -> None:
    env = ClockEnv(num_tasks=50, prompt_chars=20)
    prompts = [task.data["prompt"] for task in env.tasks("train")]
    assert len(set(prompts)) == 50 and {len(prompt) for prompt in prompts} == {20}
    assert env.tasks("val") == [] == env.tasks("test")
