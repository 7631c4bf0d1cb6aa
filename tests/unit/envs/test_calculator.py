from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from agentrl_envs.calculator import Calculator, demos, stories
from agentrl_envs.calculator.env import AnswerRubric, parse_answer
from agentrl_tools.calculator.tool import calculate

from agentrl.env.base import Episode
from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig
from agentrl.errors import EnvError
from agentrl.tool.spec import find_spec
from agentrl.types import Action, ToolCall, ToolResult, ToolStatus


def final_score(text: str, *, answer: int, truncated: bool = False) -> float:
    env = Calculator()
    task = next(t for t in env.tasks("train") if t.data["answer"] == answer)
    env.reset(options={"task": task})
    *_, terminated, _, info = env.step(Action(text=text, content=text, truncated=truncated))
    assert terminated
    episode = Episode(task=task, messages=[], turns=[], info=info, sandboxes=None)  # type: ignore[arg-type]
    score = AnswerRubric().score(episode)
    assert score.success == (score.reward == 1.0)
    return score.reward


def test_the_environment_keeps_its_contract() -> None:
    assert asyncio.run(check_env(EnvConfig(id="calculator"), resolve_tool=find_spec)) == []


def test_splits_share_no_text_and_are_stratified_by_kind() -> None:
    texts = {
        split: [t.data["prompt"] for t in stories.tasks(split)] for split in stories.SPLIT_SIZES
    }
    together = list(itertools.chain.from_iterable(texts.values()))
    assert len(set(together)) == len(together)
    assert len(texts["test"]) == 1024
    kinds = [task.tags["kind"] for task in stories.tasks("test")]
    assert kinds.count("parity") == 512 and kinds.count("sum") == kinds.count("difference") == 256
    with pytest.raises(EnvError):
        stories.tasks("dev")


def test_the_answer_follows_from_the_text() -> None:
    for task in stories.tasks("val"):
        a, b, c = (task.data[name] for name in "abc")
        expected = {
            "sum": (a + c) * b,
            "difference": a * b - c,
            "parity": a * b + c if a * b % 2 == 0 else a * b - c,
        }[task.data["kind"]]
        assert task.data["answer"] == expected
        assert 0 < expected < 1000
        for number in (a, b, c):
            assert str(number) in task.data["prompt"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 123", 123), ("so it is\nAnswer:123 pens", 123), ("Answer: -7", -7),
        ("Answer: 12.", 12), ("123", None), ("answer: 123", None), ("Answer: 12.5", None),
        ("Answer: 1,000", None), ("Answer: 1, Answer: 2", None), ("Answer: 12x", None),
        ("Answer: x Answer: 5", None), ("Answer: " + "9" * 5000, None), ("", None),
        ("Answer: \uff11\uff12", None), ("\u0410nswer: 12", None),
    ],
)  # fmt: skip
def test_exactly_one_stated_number_is_an_answer(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


def test_only_the_right_answer_in_the_last_message_pays() -> None:
    assert final_score("Answer: 200", answer=200) == 1.0
    assert final_score("Answer: 201", answer=200) == 0.0
    assert final_score("200", answer=200) == 0.0
    assert final_score("Answer: 200", answer=200, truncated=True) == 0.0


def test_the_episode_goes_on_while_tools_are_called() -> None:
    env = Calculator()
    env.reset(seed=0)
    call = ToolCall(name="calculator", arguments={"expression": "1+1"})
    result = ToolResult(name="calculator", content="2", status=ToolStatus.OK)
    action = Action(
        text="Answer: 5", content="Answer: 5", tool_calls=(call,), tool_results=(result,)
    )
    assert env.step(action)[1:] == (0.0, False, False, {})


def test_an_episode_without_a_final_message_earns_nothing() -> None:
    task = stories.tasks("train")[0]
    episode = Episode(task=task, messages=[], turns=[], info={}, sandboxes=None)  # type: ignore[arg-type]
    assert AnswerRubric().score(episode).reward == 0.0


def test_demonstrations_show_what_the_tool_answers() -> None:
    for demo in itertools.islice(Calculator().demonstrations("train", 0), 200):
        messages = list(demo.messages or ())
        for call_message, answer in itertools.pairwise(messages):
            if answer["role"] == "tool":
                (call,) = call_message.get("tool_calls", [])
                expression = call["function"]["arguments"]["expression"]
                assert answer["content"] == asyncio.run(calculate(expression))
        stated = parse_answer(messages[-1]["content"])
        assert (stated == demo.task.data["answer"]) == demo.metadata["success"]


def test_demonstrations_are_reproducible_and_right_about_half() -> None:
    env = Calculator()
    first, again = (list(itertools.islice(env.demonstrations("train", 5), 2000)) for _ in range(2))
    assert [demo.messages for demo in first] == [demo.messages for demo in again]
    assert 0.45 < sum(demo.metadata["success"] for demo in first) / 2000 < 0.65
    train = {task.id for task in env.tasks("train")}
    assert all(demo.task.id in train for demo in first)


def test_a_policy_without_slips_is_always_right() -> None:
    rng = random.Random(0)
    for task in stories.tasks("val"):
        assert demos.plan(task.data, rng, demos.NO_SLIPS)[1] == task.data["answer"]
