from __future__ import annotations

import warnings

import pytest
from agentrl_envs.calculator import Calculator
from agentrl_envs.code_sandbox import CodeSandbox
from agentrl_envs.guess_number import GuessNumber
from gymnasium.utils.env_checker import check_env
from misbehaving import Coroutines

from agentrl.env.adapters.gym import as_gymnasium


@pytest.mark.parametrize("make", [GuessNumber, Calculator, CodeSandbox, Coroutines])
def test_gymnasiums_own_check_passes(make: type) -> None:
    env = as_gymnasium(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    env.close()
    env.close()


def test_a_seed_fixes_the_episode_and_text_is_an_action() -> None:
    env = as_gymnasium(GuessNumber())
    first, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    other = {env.reset(seed=seed)[0] for seed in range(20)}
    assert first == again and len(other) > 1
    observation, reward, terminated, truncated, info = env.step("no number")
    assert "Say one number" in observation and not terminated and not truncated
