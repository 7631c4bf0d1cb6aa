from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from typing import Any

import pytest

from agentrl.agent.renderer import Renderer
from agentrl.env.base import Demonstration, Env, Observation, ScriptedTurn
from agentrl.env.config import EnvConfig
from agentrl.errors import EnvError
from agentrl.sandbox.base import SandboxProvider
from agentrl.testing import EchoEnv, FakeSandboxes, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.train.demonstrations import collect_demonstrations, open_player
from agentrl.train.sft_data import ChatExample
from agentrl.types import Action, Message, Task, ToolCall


class Written(EchoEnv):
    """Writes its demonstrations down."""

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        for index in count():
            messages: list[Message] = [
                {"role": "user", "content": f"{split} {seed} {index}"},
                {"role": "assistant", "content": "yes"},
            ]
            yield Demonstration(task=Task(id=str(index), data={}), messages=messages)


class Doubling(Env):
    """Asks for the double of a number, twice; odd numbers break it where asked to."""

    def __init__(self, broken: bool = False) -> None:
        self._broken = broken
        self._number = self._turn = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=f"{split}-{n}", data={"number": n}) for n in range(4)]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._number, self._turn = self.pick_task(seed, options).data["number"], 0
        return f"double {self._number}", {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._broken and self._number % 2:
            raise RuntimeError("odd")
        self._turn += 1
        right = action.text == str(2 * self._number)
        return "once more" if right else "wrong", float(right), self._turn == 2, False, {}

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        tasks = self.tasks(split)

        def policy(messages: Sequence[Message]) -> ScriptedTurn:
            number = int(messages[0]["content"].split()[1])
            return ScriptedTurn(content=str(2 * number))

        for index in count():
            yield Demonstration(task=tasks[index % len(tasks)], policy=policy)


def _collect(
    env: Any,
    num: int,
    *,
    tools: Sequence[str] = (),
    sandboxes: SandboxProvider | None = None,
    **kwargs: Any,
) -> list[ChatExample]:
    async def run() -> list[ChatExample]:
        config = EnvConfig(id=f"{__file__}:{type(env).__name__}", kwargs=kwargs, process=False)
        async with open_player(
            config,
            toolbox=Toolbox(tools),
            sandboxes=sandboxes or FakeSandboxes(),
            renderer=Renderer(make_tokenizer()),
            seed=0,
        ) as play:
            return await collect_demonstrations(
                env, "train", seed=5, count=num, tools=(), play=play
            )

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_written_demonstrations_are_taken_as_they_are_in_order() -> None:
    examples = _collect(Written(), 70)
    assert [example.messages[0]["content"] for example in examples] == [
        f"train 5 {index}" for index in range(70)
    ]


def test_scripted_policies_are_played_against_the_real_environment() -> None:
    examples = _collect(Doubling(), 5)
    assert list(examples[3].messages[:4]) == [
        {"role": "user", "content": "double 3"},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "once more"},
        {"role": "assistant", "content": "6"},
    ]
    assert [example.messages[1]["content"] for example in examples] == ["0", "2", "4", "6", "0"]


def test_too_many_failed_episodes_are_an_error_that_says_how_many_and_why() -> None:
    with pytest.raises(EnvError, match=r"\d+ of 64 episodes failed.*RuntimeError: odd"):
        _collect(Doubling(broken=True), 64, broken=True)


class _Computing(Doubling):
    """Whose demonstrations have the tool compute."""

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        def policy(messages: Sequence[Message]) -> ScriptedTurn:
            call = ToolCall(name="python", arguments={"code": "1"})
            return ScriptedTurn(tool_calls=[call])

        for task in cycle(self.tasks(split)):
            yield Demonstration(task=task, policy=policy)


def test_sandboxes_that_cannot_be_had_are_named_as_the_cause() -> None:
    with pytest.raises(EnvError, match=r"64 of 64 episodes failed.*no sandbox could be had"):
        _collect(_Computing(), 64, tools=["python"], sandboxes=FakeSandboxes(fails=True))


class _Bad(EchoEnv):
    def __init__(self, items: Sequence[Any] = (), error: Exception | None = None) -> None:
        super().__init__()
        self._items = items
        self._error = error

    def demonstrations(self, split: str, seed: int) -> Iterator[Any]:
        yield from self._items
        if self._error is not None:
            raise self._error


TASK = Task(id="t", data={})
BAD = [
    (_Bad(), "ended after 0"),
    (_Bad(error=ZeroDivisionError("oops")), "raised ZeroDivisionError: oops"),
    (_Bad(["hello"]), "yielded str"),
    (_Bad([Demonstration(task=TASK)]), "neither messages nor a policy"),
    (_Bad([Demonstration(task=TASK, messages=[])]), "item 0: messages must be a list"),
    (
        _Bad([Demonstration(task=TASK, messages=[{"role": "user", "content": "hi"}])]),
        "no assistant message",
    ),
    (EchoEnv(), "set model.path"),
    (object(), "set model.path"),
]


@pytest.mark.parametrize(("env", "message"), BAD)
def test_an_environment_that_cannot_demonstrate_is_refused_with_the_reason(
    env: Any, message: str
) -> None:
    async def never(demonstration: Demonstration, index: int) -> Sequence[Message]:
        raise AssertionError("nothing to play")

    async def run() -> None:
        await collect_demonstrations(env, "train", seed=0, count=3, tools=(), play=never)

    with pytest.raises(EnvError, match=message):
        asyncio.run(run())
