from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from typing import Any

import pytest
from misbehaving import GradedAsync, GradedSync, Obedient, Returning

from agentrl.env.base import Env, Episode
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.errors import (
    ConfigError,
    EnvError,
    EnvTimeout,
    InfrastructureError,
    RewardError,
    RewardTimeout,
    SandboxError,
    ThreadLeakError,
)
from agentrl.types import Action, Task

TASK = Task(id="t1", data={})
SHORT_S = 0.2


def act(text: str) -> Action:
    return Action(text=text, content=text)


def hosts_of(cls: type, *, reward_timeout_s: float = 30.0, **config: Any) -> EnvHosts:
    return EnvHosts(EnvConfig(**config), cls=cls, reward_timeout_s=reward_timeout_s)


def episode(**info: Any) -> Episode:
    return Episode(task=TASK, messages=[], turns=[], info=info, sandboxes=None)  # type: ignore[arg-type]


def test_answers_pass_through_and_anchor_follows_the_state() -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, kwargs={"greeting": "good day"})
        env = await hosts.open()
        assert await env.reset(seed=7, options={"task": TASK}) == ("good day", {"seed": 7})
        assert await env.anchor() == "step 0"
        observation, reward, terminated, truncated, info = await env.step(act("say yes"))
        assert (observation, reward, terminated, truncated) == ("yes done", 0.5, False, False)
        assert await env.anchor() == "step 1"
        assert info["thread"] != threading.get_ident()
        await env.close()
        await hosts.close()

    asyncio.run(run())


def test_an_environment_stays_on_one_thread_and_threads_are_bounded() -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, threads=2)
        envs = [await hosts.open() for _ in range(6)]
        seen = []
        for _ in range(3):
            answers = await asyncio.gather(*(env.step(act("go")) for env in envs))
            seen.append([info["thread"] for *_, info in answers])
        assert seen[0] == seen[1] == seen[2]
        assert len(set(seen[0])) == 2
        await hosts.close()

    asyncio.run(run())


def test_a_hang_costs_its_own_environment_and_fails_neighbours_as_infrastructure() -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, threads=1, step_timeout_s=SHORT_S, kwargs={})
        guilty, neighbour = await hosts.open(), await hosts.open()
        await guilty.reset(seed=3, options={"task": TASK})
        outcomes = await asyncio.gather(
            guilty.step(act("sleep 2")), neighbour.step(act("go")), return_exceptions=True
        )
        assert isinstance(outcomes[0], EnvTimeout)
        assert "t1" in str(outcomes[0]) and "seed 3" in str(outcomes[0])
        assert isinstance(outcomes[1], InfrastructureError)
        with pytest.raises(InfrastructureError):
            await neighbour.step(act("go"))
        replacement = await hosts.open()
        assert (await replacement.step(act("say again")))[0] == "again done"
        assert hosts.stats.num_timeouts == hosts.stats.num_abandoned_threads == 1
        assert hosts.num_leaked_threads == 1
        await hosts.close()

    asyncio.run(run())


def test_waiting_in_line_is_not_held_against_an_environment() -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, threads=1, step_timeout_s=0.5)
        envs = [await hosts.open() for _ in range(4)]
        # Together 0.8 s on one thread, more than the deadline; each by itself is well within it.
        answers = await asyncio.gather(*(env.step(act("sleep 0.2")) for env in envs))
        assert len(answers) == 4
        await hosts.close()

    asyncio.run(run())


def test_a_thread_that_returns_late_is_no_longer_a_leak() -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, step_timeout_s=0.1)
        env = await hosts.open()
        with pytest.raises(EnvTimeout):
            await env.step(act("sleep 0.4"))
        assert hosts.num_leaked_threads == 1
        while hosts.num_leaked_threads:
            await asyncio.sleep(0.02)
        await hosts.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_too_many_leaked_threads_stop_the_run() -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, step_timeout_s=0.1, max_leaked_threads=1)
        bystander = await hosts.open()
        first, second = await hosts.open(), await hosts.open()
        with pytest.raises(EnvTimeout):
            await first.step(act("sleep 3"))
        with pytest.raises(ThreadLeakError, match="max_leaked_threads=1.*env.process=true"):
            await second.step(act("sleep 3"))
        with pytest.raises(ThreadLeakError):
            await bystander.step(act("go"))
        with pytest.raises(ThreadLeakError):
            await hosts.open()
        await hosts.close()

    asyncio.run(run())


@pytest.mark.parametrize("command", ["raise x < 3", "exit 4"])
def test_what_an_environment_raises_names_environment_task_seed_and_place(command: str) -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient)
        env = await hosts.open()
        await env.reset(seed=11, options={"task": TASK})
        with pytest.raises(EnvError) as caught:
            await env.step(act(command))
        for part in ("Obedient", "'t1'", "seed 11", "misbehaving.py:"):
            assert part in str(caught.value)
        assert "Traceback" in caught.value.__notes__[0]
        # The environment raised, but its thread is fine.
        assert (await env.step(act("say on")))[0] == "on done"
        await hosts.close()

    asyncio.run(run())


def test_infrastructure_failures_of_an_environment_keep_their_type() -> None:
    class Remote(Obedient):
        def step(self, action: Action) -> Any:
            raise SandboxError("the server is gone")

    async def run() -> None:
        env = await hosts_of(Remote).open()
        with pytest.raises(SandboxError, match="the server is gone"):
            await env.step(act("go"))

    asyncio.run(run())


def test_a_constructor_that_raises_is_an_env_error() -> None:
    async def run() -> None:
        with pytest.raises(EnvError, match="no such database"):
            await hosts_of(Obedient, kwargs={"fail": True}).open()

    asyncio.run(run())


def test_unknown_arguments_are_refused_before_anything_opens() -> None:
    with pytest.raises(ConfigError, match="env.kwargs.greetin: .*did you mean 'greeting'"):
        hosts_of(Obedient, kwargs={"greetin": "x"})


@pytest.mark.parametrize("value", [None, "", "  ", [], 3, ("hi",), ("hi", None), (["hi"], {})])
def test_a_reset_of_the_wrong_type_names_environment_and_seed(value: Any) -> None:
    if not (isinstance(value, tuple) and len(value) != 2):
        value = value if isinstance(value, tuple) else (value, {})

    async def run() -> None:
        env = await hosts_of(Returning, kwargs={"reset": value}).open()
        with pytest.raises(EnvError, match="Returning.*seed 5"):
            await env.reset(seed=5)

    asyncio.run(run())


def test_a_cancelled_caller_leaves_the_environment_usable_for_close() -> None:
    closed = threading.Event()

    class Slow(Obedient):
        def close(self) -> None:
            closed.set()

    async def run() -> None:
        hosts = hosts_of(Slow, step_timeout_s=5.0)
        env = await hosts.open()
        step = asyncio.create_task(env.step(act("sleep 0.3")))
        await asyncio.sleep(0.05)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await env.close()
        assert closed.is_set()
        assert hosts.stats.num_abandoned_threads == 0
        await hosts.close()

    asyncio.run(run())


def test_a_cancelled_caller_does_not_hide_a_hang() -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, step_timeout_s=SHORT_S)
        env = await hosts.open()
        step = asyncio.create_task(env.step(act("sleep 2")))
        await asyncio.sleep(0.05)
        step.cancel()
        while not hosts.stats.num_abandoned_threads:
            await asyncio.sleep(0.02)
        await env.close()
        await hosts.close()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("greeting", ["clingy", "raises on close"])
def test_close_is_bounded_and_never_raises_for_the_environment(greeting: str) -> None:
    async def run() -> None:
        hosts = hosts_of(Obedient, close_timeout_s=SHORT_S, kwargs={"greeting": greeting})
        env = await hosts.open()
        await env.close()
        await env.close()
        assert hosts.stats.num_close_errors == 1
        await hosts.close()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("cls", [GradedSync, GradedAsync])
def test_rubrics_run_with_a_deadline_and_bad_scores_are_reward_errors(cls: type) -> None:
    async def run() -> None:
        hosts = hosts_of(cls, reward_timeout_s=SHORT_S)
        env = await hosts.open()
        assert env.rubric is not None
        assert (await env.rubric.score(episode())).reward == 1.0
        for verdict in ("raise", "nan", "none"):
            with pytest.raises(RewardError):
                await env.rubric.score(episode(verdict=verdict))
        late = await hosts.open()
        assert late.rubric is not None
        with pytest.raises(RewardTimeout, match="rollout.reward_timeout_s"):
            await late.rubric.score(episode(verdict="hang"))
        await hosts.close()

    asyncio.run(run())


def test_tool_state_is_asked_once_per_episode() -> None:
    asked = []

    class WithTools(Obedient):
        tools = ("python",)

        def tool_state(self, tool: str) -> dict[str, Any]:
            asked.append(tool)
            return {"setup": "x = 1"} if tool == "python" else {}

    async def run() -> None:
        env = await hosts_of(WithTools).open()
        assert env.tools == ("python",)
        await env.reset(seed=0)
        assert await env.tool_state("python") == {"setup": "x = 1"}
        assert await env.tool_state("python") == {"setup": "x = 1"}
        assert asked == ["python"]

    asyncio.run(run())


def test_a_class_itself_cannot_run_in_a_process() -> None:
    with pytest.raises(ConfigError, match="env.id="):
        EnvHosts(EnvConfig(process=True), cls=Obedient)


def test_tools_given_as_one_text_are_refused() -> None:
    class OneTool(Env):
        tools = "python"

    async def run() -> None:
        with pytest.raises(EnvError, match="must be a list"):
            await hosts_of(OneTool).open()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["tools", "rubric"])
def test_tools_and_rubric_of_a_wrong_type_are_refused_when_it_opens(name: str) -> None:
    broken = type("Broken", (Obedient,), {name: 3})

    async def run() -> None:
        hosts = hosts_of(broken)
        with pytest.raises(EnvError, match=f"{name} must be"):
            await hosts.open()
        await hosts.close()

    asyncio.run(run())


class Cancelling(Env):
    """As where something inside it was cancelled by somebody else."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        raise asyncio.CancelledError("of another loop")

    def step(self, action: Action) -> Any:
        raise asyncio.CancelledError


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_cancellation_that_an_environment_raises_is_an_error_of_its_own(method: str) -> None:
    async def run() -> None:
        hosts = hosts_of(Cancelling)
        env = await hosts.open()
        with pytest.raises(EnvError, match=f"{method} raised CancelledError"):
            await (env.reset() if method == "reset" else env.step(act("x")))
        await env.close()
        await hosts.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("process", "owner", "name", "error"),
    [
        (False, threading.Thread, "start", RuntimeError("can't start new thread")),
        (True, subprocess, "Popen", BlockingIOError(11, "Resource temporarily unavailable")),
    ],
)
def test_a_machine_that_gives_no_thread_or_process_is_our_failure(
    monkeypatch: pytest.MonkeyPatch, process: bool, owner: Any, name: str, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    async def run() -> None:
        config = EnvConfig(id=f"{Obedient.__module__}:{Obedient.__name__}", process=process)
        hosts = EnvHosts(config)
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(owner, name, refuse)
        with pytest.raises(InfrastructureError, match="could be started for it"):
            await hosts.open()
        assert os.listdir("/proc/self/fd") == before
        monkeypatch.undo()
        await (await hosts.open()).close()  # the next one may find room
        await hosts.close()

    asyncio.run(run())
