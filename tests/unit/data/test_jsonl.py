from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.jsonl import read_jsonl
from agentrl.errors import DataError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jsonl")


@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=5), ascii=st.booleans())
def test_what_json_writes_is_read_back(folder: Path, rows: list[dict], ascii: bool) -> None:
    path = folder / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    assert read_jsonl(path).rows == rows


def test_marks_blank_lines_and_odd_line_ends_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    # U+2028 ends a line for str.splitlines, and is ordinary text within JSON.
    path.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\n  \n{"a": "z"}'.encode())
    table = read_jsonl(path)
    assert table.rows == [{"a": "x\u2028y"}, {"a": "z"}]
    assert [table.place(index) for index in (0, 1)] == [f"{path}, line 1", f"{path}, line 4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": 1', "line 2 is broken JSON: Expecting"),
        (b'{"a": 1}\n\n{"a": 1} {"a": 2}', "line 3 is broken JSON: Extra data"),
        (b'{"a": NaN}', "line 1 is broken JSON: NaN is no JSON number"),
        (b'{"a": 1}\n{"a": 1e999}', "line 2 is broken JSON: .*1e999.* is beyond the range"),
        (b'{"a": {"b": [0, -1.5e400]}}', "line 1 is broken JSON: .*-1.5e400.* is beyond"),
        (b'{"a": 1' + b"0" * 4000 + b".5}", "line 1 is broken JSON: .* is beyond the range"),
        (b'{"a": -Infinity}', "line 1 is broken JSON: -Infinity is no JSON number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "line 1 .*the name 'c' stands twice"),
        (b'{"a": "\xff"}', "line 1 is not UTF-8"),
        (b"\xff\xfe{\x00}\x00", "is UTF-16; save it as UTF-8"),
        (b'[\n{"a": 1}\n]', "line 1 is broken JSON.*one JSON array over several lines"),
        (b'[{"a": 1}]', "line 1 holds a list, not an object"),
        (b'{"a": 1}\n3', "line 2 holds a number, not an object"),
        (b"null", "line 1 holds null, not an object"),
        (b'{"a": ' + b"[" * 100_000, "line 1 is broken JSON: nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "line 1 is broken JSON: "),
    ],
)
def test_a_broken_line_is_refused_with_its_number(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"bad.jsonl,? {message}") as caught:
        read_jsonl(path)
    assert len(str(caught.value)) < 600


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*none.jsonl.*No such file"):
        read_jsonl(tmp_path / "none.jsonl")
