from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.data.arrow import parse_hub
from agentrl.data.config import ColumnsConfig, DataConfig
from agentrl.data.load import read_tasks
from agentrl.data.source import read_source
from agentrl.errors import ConfigError, DataError

ROWS = [
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": f"question {index}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index},
    }
    for index in range(5)
]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def ids(source: str, split: str = "train") -> list[str]:
    config = DataConfig()
    setattr(config, split, source)
    return [task.id for task in read_tasks(config, split)]


EXPECTED = [f"mine/train/{index}" for index in range(5)]


def test_verls_parquet_becomes_tasks(tmp_path: Path) -> None:
    tasks = read_tasks(DataConfig(train=write(tmp_path / "train.parquet", ROWS)), "train")
    assert [task.id for task in tasks] == EXPECTED
    assert {**ROWS[3], "answer": "3"} == tasks[3].data
    json.dumps(dict(tasks[3].data))


def test_jsonl_parquet_and_saved_datasets_give_the_same_tasks(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p{i}", "answer": str(i), "level": i, "more": [1.5, None]} for i in range(4)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write(tmp_path / "a.parquet", rows)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    found = [
        read_tasks(DataConfig(train=str(tmp_path / name)), "train")
        for name in ("a.jsonl", "a.parquet", "saved")
    ]
    assert found[0] == found[1] == found[2], "ids from contents included"


def test_a_pattern_takes_all_shards_in_order(tmp_path: Path) -> None:
    write(tmp_path / "part-1.parquet", ROWS[3:])
    write(tmp_path / "part-0.parquet", ROWS[:3])
    assert ids(str(tmp_path / "part-*.parquet")) == EXPECTED
    with pytest.raises(DataError, match="no file matches"):
        ids(str(tmp_path / "other-*.parquet"))


def test_selected_rows_of_a_saved_dataset_are_those_that_are_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).select([4, 1]).save_to_disk(tmp_path / "some")
    assert ids(str(tmp_path / "some")) == [EXPECTED[4], EXPECTED[1]]


def test_a_saved_dataset_with_splits_wants_one_named(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"holds the splits test, train: name one, such as .*test"):
        ids(str(tmp_path / "both"))
    assert ids(str(tmp_path / "both" / "train")) == EXPECTED


def test_load_dataset_names_its_split(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    write(folder / "train.parquet", ROWS)
    write(folder / "test.parquet", ROWS[:2])
    assert ids(f"hf:{folder}") == EXPECTED
    assert ids(f"hf:{folder}:test") == EXPECTED[:2]
    assert ids(f"hf:{folder}", "test") == EXPECTED[:2]
    assert ids(f"hf:{folder}:default:train[:3]") == EXPECTED[:3]
    with pytest.raises(DataError, match="cannot load .*split 'dev'"):
        ids(f"hf:{folder}::dev")


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("hf:a/b", ("a/b", None, "validation")),
        ("hf:a/b:main", ("a/b", "main", "validation")),
        ("hf:a/b:train", ("a/b", None, "train")),
        ("hf:a/b::main", ("a/b", None, "main")),
        ("hf:a/b:main:train", ("a/b", "main", "train")),
        ("hf:a/b::train[:9]", ("a/b", None, "train[:9]")),
    ],
)
def test_what_a_hub_name_means(spec: str, parts: tuple[Any, ...]) -> None:
    assert parse_hub(spec, split="val") == parts


@pytest.mark.parametrize("spec", ["hf:", "hf::main", "hf:a:", "hf:a:b:"])
def test_a_hub_name_that_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="write hf:NAME"):
        parse_hub(spec, split="train")


def test_mixed_types_and_infinite_numbers_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": "a", "x": 1.0}, {"prompt": "q", "answer": "a", "x": 2.0}]
    source = write(tmp_path / "a.parquet", [rows[0], {**rows[1], "x": float("nan")}])
    with pytest.raises(DataError, match="a.parquet, row 2, column 'x' holds a number that is not"):
        ids(source)
    nested = write(
        tmp_path / "b.parquet", [{**rows[0], "y": None}, {**rows[1], "y": [{"z": float("inf")}]}]
    )
    with pytest.raises(DataError, match="b.parquet, row 2, column 'y'"):
        ids(nested)


def test_columns_that_no_task_can_carry_are_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.datetime(2026, 1, 1)
    source = write(tmp_path / "a.parquet", [{"prompt": "p", "answer": "a", "i": b"x", "t": now}])
    (task,) = read_tasks(DataConfig(train=source), "train")
    assert "i" not in task.data and "the columns i, t hold values" in caplog.text
    with pytest.raises(DataError, match="the column 'i' holds values that no task can carry"):
        read_tasks(DataConfig(train=source, columns=ColumnsConfig(answer="i")), "train")


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 this is not parquet")
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    write(tmp_path / "empty.parquet", [])
    for source, message in {
        str(broken): "cannot read .*broken.parquet' as parquet",
        str(tmp_path / "a.csv"): r"ends in .csv; known are .jsonl",
        str(tmp_path / "empty.jsonl"): "data.train: no rows",
        str(tmp_path / "empty.parquet"): "data.train: no rows",
        str(tmp_path / "nothing.jsonl"): "there is no such file.*hf:NAME",
        str(tmp_path): "is a directory without a saved dataset",
        " ": "data.train is empty",
    }.items():
        with pytest.raises(DataError, match=message):
            ids(source)


@pytest.mark.parametrize(
    ("name", "module"),
    [("a.parquet", "pyarrow.parquet"), ("saved", "datasets"), ("hf:x", "datasets")],
)
def test_a_missing_extra_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    write(tmp_path / "a.parquet", ROWS)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, module, None)
    source = name if name.startswith("hf:") else str(tmp_path / name)
    with pytest.raises(
        ConfigError, match=r"needs the extra 'data', .*: pip install -e '\.\[data\]'"
    ) as caught:
        read_source(source, split="train")
    assert "\n" not in str(caught.value)
