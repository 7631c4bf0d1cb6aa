from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from misbehaving import Coroutines

from agentrl.env.async_host import score_on_loop
from agentrl.env.base import Episode
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.errors import EnvError, EnvTimeout, RewardError, RewardTimeout
from agentrl.types import Action, Task


def act(text: str) -> Action:
    return Action(text=text, content=text)


def hosts_of(**config: Any) -> EnvHosts:
    return EnvHosts(EnvConfig(**config), cls=Coroutines, reward_timeout_s=0.2)


def test_coroutines_pass_through() -> None:
    async def run() -> None:
        env = await hosts_of().open()
        assert await env.reset(seed=4) == ("hello", {"seed": 4})
        assert await env.step(act("say yes")) == ("yes done", 1.0, True, False, {})
        assert await env.tool_state("python") == {"tool": "python"}
        assert await env.anchor() is None
        await env.close()

    asyncio.run(run())


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_step_that_hangs_ends_at_its_deadline(stubborn: bool) -> None:
    async def run() -> None:
        env = await hosts_of(step_timeout_s=0.1, kwargs={"stubborn": stubborn}).open()
        start = time.monotonic()
        with pytest.raises(EnvTimeout, match="step did not return within 0.1 s"):
            await env.step(act("sleep 600"))
        assert time.monotonic() - start < 60
        await asyncio.sleep(0.3)

    asyncio.run(run())


def test_errors_and_late_rubrics_have_their_types() -> None:
    async def run() -> None:
        env = await hosts_of().open()
        await env.reset(seed=9, options={"task": Task(id="t", data={})})
        with pytest.raises(EnvError, match="seed 9.*raised ValueError: x"):
            await env.step(act("raise x"))
        assert env.rubric is not None
        episode = Episode(
            task=Task(id="t", data={}),
            messages=[],
            turns=[],
            info={"verdict": "hang"},
            sandboxes=None,  # type: ignore[arg-type]
        )
        with pytest.raises(RewardTimeout):
            await env.rubric.score(episode)

    asyncio.run(run())


def test_cancelling_the_caller_cancels_the_step() -> None:
    async def run() -> None:
        env = await hosts_of().open()
        step = asyncio.create_task(env.step(act("sleep 600")))
        await asyncio.sleep(0.05)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(asyncio.wait_for(run(), 20))


EPISODE = Episode(
    task=Task(id="t", data={}),
    messages=[],
    turns=[],
    info={},
    sandboxes=None,  # type: ignore[arg-type]
)


class Cancelling:
    async def score(self, episode: Episode) -> Any:
        raise asyncio.CancelledError


class Swallowing:
    """Ignores its cancellation for a while."""

    async def score(self, episode: Episode) -> Any:
        for _ in range(3):
            try:
                await asyncio.sleep(0.3)
            except asyncio.CancelledError:
                continue


def test_a_rubric_that_raises_cancelled_error_is_a_reward_error() -> None:
    with pytest.raises(RewardError, match="e: the rubric raised CancelledError"):
        asyncio.run(score_on_loop(Cancelling(), EPISODE, label="e", timeout_s=30))


def test_a_rubric_that_swallows_its_cancellation_is_late() -> None:
    with pytest.raises(RewardTimeout, match="e: the rubric did not return within 0.05 s"):
        asyncio.run(score_on_loop(Swallowing(), EPISODE, label="e", timeout_s=0.05))


def test_our_own_cancellation_still_ends_the_scoring() -> None:
    async def run() -> None:
        work = asyncio.create_task(score_on_loop(Swallowing(), EPISODE, label="e", timeout_s=30))
        await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(run())


@pytest.mark.parametrize("anchor", [5, b"x", ["s"]])
def test_an_anchor_that_is_no_text_is_refused_as_that_of_a_plain_environment(anchor: Any) -> None:
    class Anchored(Coroutines):
        async def anchor(self) -> Any:
            return anchor

    async def run() -> None:
        env = await EnvHosts(EnvConfig(), cls=Anchored).open()
        with pytest.raises(EnvError, match="anchor must return text or None, got"):
            await env.anchor()

    asyncio.run(run())


def test_methods_that_take_other_arguments_are_the_environments_fault() -> None:
    class Odd(Coroutines):
        async def reset(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
            return "hello", {}

        async def step(self) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
            return "", 0.0, True, False, {}

        async def close(self, how: str) -> None:  # type: ignore[override]
            raise AssertionError("cannot be called")

    async def run() -> None:
        env = await EnvHosts(EnvConfig(), cls=Odd).open()
        with pytest.raises(EnvError, match="reset raised TypeError"):
            await env.reset(seed=1)
        with pytest.raises(EnvError, match="step raised TypeError"):
            await env.step(act("x"))
        await env.close()

    asyncio.run(run())
