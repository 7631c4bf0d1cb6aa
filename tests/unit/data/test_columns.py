from __future__ import annotations

import random
from typing import Any

import pytest

from agentrl.data.columns import to_tasks
from agentrl.data.config import ColumnsConfig
from agentrl.data.table import Table
from agentrl.errors import DataError
from agentrl.types import Task


def table(*rows: dict[str, Any], name: str = "f.jsonl") -> Table:
    return Table(name=name, rows=rows, unit="line", numbers=range(1, len(rows) + 1))


def tasks(*rows: dict[str, Any], **columns: Any) -> list[Task]:
    return to_tasks([table(*rows)], ColumnsConfig(**columns), key="data.train")


def verl_row(index: int, **fields: Any) -> dict[str, Any]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"question {index}", "name": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index},
    }
    return {**row, **fields}


def test_columns_are_mapped_and_the_others_come_along() -> None:
    (task,) = tasks(
        {"question": "q?", "final": "4", "name": "q-1", "level": 3, "source": "s"},
        prompt="question",
        answer="final",
        id="name",
        tags=["level", "source"],
    )
    assert task == Task(
        id="q-1",
        data={
            "prompt": "q?",
            "answer": "4",
            "level": 3,
            "source": "s",
            "reward_model": {"style": "rule", "ground_truth": "4"},
        },
        tags={"level": "3", "source": "s"},
    )


def test_a_column_under_another_ones_name_gives_way_to_the_one_that_was_asked_for() -> None:
    (task,) = tasks({"prompt": "p", "answer": "long", "short": "4"}, answer="short")
    assert task.data["answer"] == "4"


def test_verls_layout_is_taken_as_it_is() -> None:
    first, second = tasks(verl_row(0), verl_row(1))
    assert (first.id, second.id) == ("openai/gsm8k/train/0", "openai/gsm8k/train/1")
    assert first.data["prompt"] == [{"role": "user", "content": "question 0"}]
    assert first.data["answer"] == "0"
    for name in ("data_source", "ability", "reward_model", "extra_info"):
        assert first.data[name] == verl_row(0)[name]


def test_fields_of_columns_can_be_named() -> None:
    (task,) = tasks(
        {"prompt": "p", "meta": {"key": 7, "gold": "x"}},
        answer="meta.gold",
        id="meta.key",
        tags=["meta.gold"],
    )
    assert (task.id, task.data["answer"], task.tags) == ("7", "x", {"meta.gold": "x"})


def test_tasks_may_have_neither_prompt_nor_answer() -> None:
    (task,) = tasks({"secret": 4}, prompt=None, answer=None)
    assert task.data == {"secret": 4}


def test_ids_from_contents_do_not_depend_on_where_a_row_stands() -> None:
    rows = [{"prompt": f"p{index}", "answer": "a", "n": index} for index in range(20)]
    shuffled = [dict(random.Random(1).sample(list(row.items()), 3)) for row in reversed(rows)]
    by_id = {task.id: task.data["n"] for task in tasks(*rows)}
    assert by_id == {task.id: task.data["n"] for task in tasks(*shuffled)}
    assert len(by_id) == 20


def test_a_missing_column_lists_those_there_are() -> None:
    with pytest.raises(
        DataError,
        match=r"data.train has no column 'prompt'; did you mean 'promt'\? its columns: promt, "
        r"answer. Set data.columns.prompt=COLUMN, or null where tasks have no prompt",
    ):
        tasks({"promt": "p", "answer": "a"})
    with pytest.raises(DataError, match=r"no column 'answer'.*columns: prompt, level.*null where"):
        tasks({"prompt": "p", "level": 1})
    with pytest.raises(DataError, match=r"no column 'nr'.*Set data.columns.id=COLUMN$"):
        tasks({"prompt": "p", "answer": "a"}, id="nr")
    with pytest.raises(DataError, match=r"no column 'lvl'.*data.columns.tags\[1\]"):
        tasks({"prompt": "p", "answer": "a"}, tags=["answer", "lvl"])


@pytest.mark.parametrize(
    ("second", "column", "shown"),
    [
        ({"answer": 5}, "answer", "5 among text"),
        ({"answer": ["5"]}, "answer", r"\['5'\] among text"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "prompt", "among text"),
        ({"level": "hard"}, "level", "'hard' among numbers"),
        ({"level": True}, "level", "True among numbers"),
        ({"level": {"a": 1}}, "level", "among numbers"),
    ],
)
def test_mixed_types_are_refused_with_row_and_column(
    second: dict[str, Any], column: str, shown: str
) -> None:
    rows = [{"prompt": f"p{index}", "answer": "a", "level": index} for index in range(3)]
    with pytest.raises(DataError, match=rf"^f.jsonl, line 3, column '{column}': .*{shown}.*line 1"):
        tasks(rows[0], rows[1], {**rows[2], **second})


def test_types_must_agree_between_files_and_in_fields_that_are_named() -> None:
    tables = [table({"prompt": "p", "answer": "1"}), table({"prompt": "q", "answer": 1}, name="g")]
    with pytest.raises(DataError, match=r"^g, line 1, column 'answer'.*f.jsonl, line 1"):
        to_tasks(tables, ColumnsConfig(), key="data.train")
    with pytest.raises(DataError, match="line 2, column 'reward_model.ground_truth'"):
        tasks(verl_row(0), verl_row(1, reward_model={"style": "rule", "ground_truth": 1}))


def test_whole_numbers_and_fractions_are_one_type_and_gaps_are_none() -> None:
    found = tasks(
        {"prompt": "p", "answer": "a", "level": None},
        {"prompt": "q", "answer": "a", "level": 1},
        {"prompt": "r", "answer": "a", "level": 1.5},
        {"prompt": "s", "answer": "a"},
    )
    assert [task.data.get("level") for task in found] == [None, 1, 1.5, None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None, "answer": "a"}, "column 'prompt': no prompt"),
        ({"prompt": "  ", "answer": "a"}, "column 'prompt': an empty prompt"),
        ({"answer": "a"}, "column 'prompt': no prompt"),
        ({"prompt": "p", "answer": None}, "column 'answer': no answer"),
        ({"prompt": "p"}, "column 'answer': no answer"),
    ],
)
def test_a_row_without_prompt_or_answer_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^f.jsonl, line 2, {message}"):
        tasks({"prompt": "p0", "answer": "a"}, row)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "5 is no prompt"),
        ([], "must end with one to answer"),
        ([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], "must end"),
        (["hello"], "message 0 is 'hello'"),
        ([{"role": "human", "content": "u"}], "message 0 has the role 'human'; known: system"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 has the content .*no text"),
        ([{"role": "user"}], "message 0 has the content None"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"line 1, column 'prompt': .*{message}"):
        tasks({"prompt": prompt, "answer": "a"})


def test_repeated_ids_are_refused_by_name() -> None:
    row = {"prompt": "p", "answer": "a"}
    with pytest.raises(DataError, match="line 1 and f.jsonl, line 3 hold the same task"):
        tasks(row, {**row, "prompt": "q"}, row)
    with pytest.raises(DataError, match=r"line 1 and .*line 2 have one id, '7' \(from 'n'\)"):
        tasks({**row, "n": 7}, {**row, "prompt": "q", "n": 7}, id="n")
    with pytest.raises(DataError, match="have one id, 'openai/gsm8k/train/0'"):
        tasks(verl_row(0), verl_row(1, extra_info={"split": "train", "index": 0}))


@pytest.mark.parametrize("value", [None, 1.5, "", "x" * 501, True, ["a"], "\ud800"])
def test_an_id_is_text_or_a_whole_number(value: Any) -> None:
    with pytest.raises(DataError, match="line 1, column 'n': .* is no id"):
        tasks({"prompt": "p", "answer": "a", "n": value}, id="n")


def test_a_tag_is_a_plain_value() -> None:
    with pytest.raises(DataError, match=r"line 1, column 'l': \[1\] is no tag"):
        tasks({"prompt": "p", "answer": "a", "l": [1]}, tags=["l"])


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="data.train: no rows in f.jsonl"):
        tasks()
