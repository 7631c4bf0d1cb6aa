"""Snapshot and restore: wherever an environment runs, and what `envs check` says of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig
from agentrl.env.findings import Level
from agentrl.env.host import EnvHosts
from agentrl.env.hosted import Hosted
from agentrl.errors import EnvError, EnvTimeout
from agentrl.types import Action, Task

FILE = Path(__file__).with_name("branching.py")
TASK = Task(id="t", data={})
DEADLINE_S = 60.0


def act(text: str) -> Action:
    return Action(text=text, content=text)


def hosts_of(name: str, **config: Any) -> EnvHosts:
    return EnvHosts(EnvConfig(id=f"{FILE}:{name}", **config))


async def opened(hosts: EnvHosts) -> Hosted:
    env = await hosts.open()
    await env.reset(seed=5, options={"task": TASK})
    return env


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Faithful", {"process": False, "threads": 2}),
        ("Faithful", {"process": True, "processes": 2}),
        ("WithCoroutines", {}),
    ],
)
def test_another_instance_goes_on_as_the_first_one(name: str, config: dict[str, Any]) -> None:
    async def run() -> None:
        hosts = hosts_of(name, **config)
        try:
            first = await opened(hosts)
            await first.step(act("a"))
            anchor, state = await first.anchor(), await first.snapshot()
            told = [await first.step(act(text)) for text in "bc"]

            second = await opened(hosts)  # on another thread, in another process
            await second.restore(state)
            assert await second.anchor() == anchor == "a"
            assert [await second.step(act(text)) for text in "bc"] == told

            third = await opened(hosts)  # the state is as it was, whoever went on from it
            await third.restore(state)
            observation, *_ = await third.step(act("z"))
            assert str(observation).startswith("['a', 'z']")
            assert await first.anchor() == "a b c"
        finally:
            await hosts.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Without", r"(?s)has no snapshot\(\).*rollout\.tree\.rounds=0"),
        ("Unpicklable", "what snapshot returned cannot be pickled.*plain data"),
    ],
)
def test_a_state_that_cannot_be_had_is_an_error_of_the_environment(
    name: str, message: str, process: bool
) -> None:
    async def run() -> None:
        hosts = hosts_of(name, process=process)
        try:
            env = await opened(hosts)
            with pytest.raises(EnvError, match=message):
                await env.snapshot()
            assert (await env.step(act("on")))[0]  # the environment itself is well
        finally:
            await hosts.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_snapshots_have_the_deadline_of_steps() -> None:
    async def run() -> None:
        hosts = hosts_of("Late", process=True, step_timeout_s=0.2)
        try:
            env = await opened(hosts)
            with pytest.raises(EnvTimeout, match=r"snapshot did not return within 0\.2 s"):
                await env.snapshot()
        finally:
            await hosts.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_what_restore_raises_has_a_name() -> None:
    async def run() -> None:
        hosts = hosts_of("Broken", process=False)
        try:
            env = await opened(hosts)
            with pytest.raises(EnvError, match="task 't', seed 5.*restore raised KeyError"):
                await env.restore(await env.snapshot())
            with pytest.raises(EnvError, match="restore raised UnpicklingError"):
                await env.restore(b"no pickle")
        finally:
            await hosts.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@pytest.mark.parametrize("name", ["Faithful", "Without", "WithCoroutines"])
def test_faithful_snapshots_and_none_at_all_are_fine(name: str) -> None:
    findings = asyncio.run(check_env(EnvConfig(id=f"{FILE}:{name}", process=False)))
    assert not [found for found in findings if found.level is Level.ERROR]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ForgetsChance", "restored before step 2 goes on otherwise: observation of step 2"),
        ("ForgetsWhatWasSaid", "goes on otherwise: anchor of step 1 is '1', then ''"),
        ("Disturbed", "another one where snapshots are taken"),
        ("Unpicklable", "cannot be pickled"),
        ("Broken", "restore raised KeyError"),
        ("OnlySnapshot", "restore is missing"),
    ],
)
def test_the_check_finds_states_that_are_not_whole(name: str, what: str) -> None:
    findings = asyncio.run(check_env(EnvConfig(id=f"{FILE}:{name}", process=False)))
    errors = [str(found) for found in findings if found.level is Level.ERROR]
    assert any(what in text for text in errors), findings
