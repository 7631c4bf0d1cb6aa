from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
from typing import Any

import pytest
from agentrl_envs.qa import QA, demos, questions
from agentrl_envs.qa.answers import normalized, reference_answer, same_answer, stated_answer
from agentrl_envs.qa.env import AnswerRubric
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.base import Episode
from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig
from agentrl.errors import EnvError, RewardError
from agentrl.types import Action, Task


def score(text: str, *, answer: Any, truncated: bool = False) -> float:
    env = QA()
    task = Task(id="t", data={"prompt": "How many?", "answer": answer})
    env.reset(options={"task": task})
    *_, terminated, truncation, info = env.step(
        Action(text=text, content=text, truncated=truncated)
    )
    assert terminated and not truncation, "one turn is all there is"
    episode = Episode(task=task, messages=[], turns=[], info=info, sandboxes=None)  # type: ignore[arg-type]
    graded = AnswerRubric().score(episode)
    assert graded.success == (graded.reward == 1.0)
    return graded.reward


def test_the_environment_keeps_its_contract() -> None:
    assert asyncio.run(check_env(EnvConfig(id="qa"))) == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 72", "72"), ("3+4=7\n####7", "7"), ("#### 72\nThat is all.", "72"),
        ("so #### 7 pens", "7 pens"), ("#### 7\r\n", "7"), ("  ####   x y  ", "x y"),
        ("72", None), ("", None), ("#### ", None), ("####\n72", None),
        ("#### 72\n#### 72", None), ("#### 72 #### 73", None), ("#### Step 1\n#### 72", None),
        ("### 72", None), ("##### 72", None), ("\uff03\uff03\uff03\uff03 72", None),
        ("#### " + "9" * 201, None),
    ],
)  # fmt: skip
def test_a_text_states_an_answer_behind_exactly_one_marker(text: str, answer: str | None) -> None:
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("72", "72."), ("1,200", "1200"), ("1,234,567.50", "1234567.5"), ("$5", "5"),
        ("-$5", "-5"), ("$-5", "-5"), ("50%", "50"), ("$1,000.", "1000"), ("007", "7"),
        (".5", "0.5"), ("-0", "0"), ("Paris", "paris."), ("two  words", "Two words"),
        ("1/2", " 1/2 "),
    ],
)  # fmt: skip
def test_these_answers_are_the_same(one: str, other: str) -> None:
    assert same_answer(one, other) and same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("72", "73"), ("72 or 73", "72"), ("72 pens", "72"), ("7", "-7"), ("1,00", "100"),
        ("12,5", "125"), ("1.200", "1200"), ("1e2", "100"), ("0x10", "16"),
        ("\uff17\uff12", "72"), ("\u22127", "-7"), ("\u0660", "0"), ("7..", "7"), ("%", ""),
        ("p\u0430ris", "paris"),
    ],
)  # fmt: skip
def test_these_answers_differ(one: str, other: str) -> None:
    assert not same_answer(one, other)


@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_a_whole_number_has_its_value(value: int) -> None:
    written = (f"{value}", f"{value:,}", f"${value}", f"{value}%", f"{value}.", f"{value}.00")
    assert {normalized(text) for text in written} == {value}
    assert normalized(f"{value + 1}") != value


@given(st.text(alphabet="#7 a\n.$", max_size=60))
def test_no_text_breaks_the_rule(text: str) -> None:
    answer = stated_answer(text)
    if answer is not None:
        assert re.findall("#+", text).count("####") == 1 and same_answer(answer, answer)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("He sells 48/2 = 24 clips.\n#### 72", "72"), ("72", "72"), (72, "72"), (0.5, "0.5"),
        (0.00001, "0.00001"), (-1e16, "-10000000000000000"), (float("nan"), None), (math.inf, None),
        ("#### 1\n#### 2", None), ("", None), (None, None), (True, None), (["72"], None),
    ],
)  # fmt: skip
def test_a_reference_is_a_solution_or_the_bare_answer(value: Any, answer: str | None) -> None:
    assert reference_answer(value) == answer


def test_only_the_right_answer_in_the_stated_form_pays() -> None:
    assert score("6*12=72\n#### 72", answer="because\n#### 72") == 1.0
    assert score("#### 73", answer="72") == 0.0
    assert score("72", answer="72") == 0.0
    assert score("#### 71\n#### 72", answer="72") == 0.0
    assert score("#### 72", answer="72", truncated=True) == 0.0


def test_a_task_without_an_answer_is_a_failure_of_ours_and_no_zero() -> None:
    with pytest.raises(RewardError, match=r"'t' has the answer None.*data.columns.answer"):
        score("#### 72", answer=None)


def test_an_episode_that_never_ended_earns_nothing() -> None:
    task = questions.tasks("val")[0]
    episode = Episode(task=task, messages=[], turns=[], info={}, sandboxes=None)  # type: ignore[arg-type]
    assert AnswerRubric().score(episode).reward == 0.0


def test_prompts_are_text_or_chat_messages() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    shown, _ = QA().reset(options={"task": Task(id="a", data={"prompt": chat})})
    assert shown == chat, "messages come with their own instructions"
    shown, _ = QA().reset(options={"task": Task(id="a", data={"prompt": "u"})})
    assert shown == [{"role": "system", "content": demos.SYSTEM_PROMPT}, chat[1]]
    shown, _ = QA(system_prompt="").reset(options={"task": Task(id="a", data={"prompt": "u"})})
    assert shown == [chat[1]]
    with pytest.raises(EnvError, match="'a' has the prompt None.*data.columns.prompt"):
        QA().reset(options={"task": Task(id="a", data={"question": "u"})})


def test_splits_share_no_text_and_are_stratified_by_kind() -> None:
    texts = {
        split: [task.data["prompt"] for task in questions.tasks(split)]
        for split in questions.SPLIT_SIZES
    }
    together = list(itertools.chain.from_iterable(texts.values()))
    assert len(set(together)) == len(together)
    kinds = [task.tags["kind"] for task in questions.tasks("test")]
    assert {kinds.count(kind) for kind in questions.KINDS} == {256}
    with pytest.raises(EnvError):
        questions.tasks("dev")


def test_the_answer_follows_from_the_text() -> None:
    for task in questions.tasks("val"):
        info = task.data["extra_info"]
        a, b = info["a"], info["b"]
        expected = {"more": a + b, "less": a - b, "together": 2 * a + b, "each": a * b}
        assert task.data["answer"] == str(expected[info["kind"]])
        assert task.data["reward_model"]["ground_truth"] == task.data["answer"]
        assert f" {a} " in task.data["prompt"] and str(b) in task.data["prompt"]
        assert expected[info["kind"]] > 0


def test_demonstrations_are_reproducible_and_right_about_half() -> None:
    env = QA()
    first, again = (list(itertools.islice(env.demonstrations("train", 5), 2000)) for _ in range(2))
    assert [demo.messages for demo in first] == [demo.messages for demo in again]
    for demo in first:
        text = list(demo.messages or ())[-1]["content"]
        assert demo.metadata["success"] == bool(score(text, answer=demo.task.data["answer"]))
    assert 0.45 < sum(demo.metadata["success"] for demo in first) / 2000 < 0.6
    train = {task.id for task in env.tasks("train")}
    assert all(demo.task.id in train for demo in first)


def test_a_writer_without_slips_is_always_right() -> None:
    rng = random.Random(0)
    for task in questions.tasks("val"):
        text = demos.write(task.data["extra_info"], rng, demos.NO_SLIPS)
        assert score(text, answer=task.data["answer"]) == 1.0
