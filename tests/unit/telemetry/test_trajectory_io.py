from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.telemetry.trajectory_io import (
    iter_stored,
    read_trajectories,
    tokens_path,
    write_trajectories,
)
from agentrl.testing.run_data import make_advantages, make_trajectory
from agentrl.types import (
    Score,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    ToolStatus,
    Trajectory,
    Turn,
)

TEXT = st.text(st.characters(), max_size=12)  # includes lone surrogates, U+2028, NUL
FLOAT = st.floats(width=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
TIMINGS = st.dictionaries(st.sampled_from(["generate", "tools", "env"]), st.floats(0, 1e3))


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    length = draw(st.integers(0, 6))

    def column(values: st.SearchStrategy[Any], dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=length, max_size=length)), dtype)

    return Segment(
        ids=column(st.integers(0, 2**40), np.int64),
        loss_mask=column(st.booleans(), np.bool_),
        logprobs=column(FLOAT, np.float32),
        policy_version=column(st.integers(-1, 2**31 - 1), np.int32),
        roles=column(st.integers(0, 4), np.int8),
    )


CALLS = st.builds(
    ToolCall,
    name=TEXT,
    arguments=st.dictionaries(TEXT, JSON, max_size=2),
    error=st.none() | TEXT,
)
RESULTS = st.builds(
    ToolResult,
    name=TEXT,
    content=TEXT,
    status=st.sampled_from(ToolStatus),
    duration_s=st.floats(0, 1e3),
    truncated_tokens=st.integers(0, 9),
    reward=st.floats(),
)
TURNS = st.builds(
    Turn,
    index=st.integers(0, 9),
    segment=st.integers(0, 3),
    start=st.integers(0, 9),
    end=st.integers(0, 9),
    stop_reason=st.sampled_from(StopReason),
    reward=st.floats(),
    tool_calls=st.lists(CALLS, max_size=2),
    tool_results=st.lists(RESULTS, max_size=2),
    error=st.none() | TEXT,
    anchor=st.none() | TEXT,
    terminated=st.booleans(),
    truncated=st.booleans(),
    timings_s=TIMINGS,
)
TRAJECTORIES = st.builds(
    Trajectory,
    id=TEXT,
    env_id=TEXT,
    task=st.builds(
        Task,
        id=TEXT,
        data=st.dictionaries(TEXT, JSON, max_size=3),
        tags=st.dictionaries(TEXT, TEXT, max_size=2),
    ),
    group_id=TEXT,
    sample_index=st.integers(0, 9),
    attempt=st.integers(0, 9),
    seed=st.integers(0, 2**63 - 1),
    segments=st.lists(segments(), max_size=3),
    turns=st.lists(TURNS, max_size=3),
    messages=st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=3),
    stop_reason=st.sampled_from(StopReason),
    error=st.none() | TEXT,
    score=st.none()
    | st.builds(
        Score,
        reward=st.floats(),
        success=st.booleans(),
        parts=st.dictionaries(TEXT, st.floats(), max_size=2),
    ),
    drift=st.integers(0, 9),
    wall_clock_limited=st.booleans(),
    timings_s=TIMINGS,
)


def same(left: Any, right: Any) -> bool:
    """Equality in value and type, where nan equals nan."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return type(left) is type(right) and left == right


@settings(max_examples=150, deadline=None)
@given(st.lists(TRAJECTORIES, max_size=3))
def test_round_trip_is_exact(
    tmp_path_factory: pytest.TempPathFactory, trajectories: list[Trajectory]
) -> None:
    path = tmp_path_factory.mktemp("run") / "step_000001.jsonl"
    write_trajectories(path, trajectories)
    back = read_trajectories(path)
    assert same([asdict(t) for t in back], [asdict(t) for t in trajectories])


def test_advantages_come_back_by_trajectory(tmp_path: Path) -> None:
    items = [make_trajectory(seed=i, group_id="g", success=i % 2 == 0) for i in range(4)]
    items.append(make_trajectory(seed=9, stop_reason=StopReason.ENV_ERROR))
    advantages = make_advantages(items)
    write_trajectories(tmp_path / "x.jsonl", items, advantages)
    stored = list(iter_stored(tmp_path / "x.jsonl"))
    for item in stored[:4]:
        assert item.advantages is not None
        np.testing.assert_array_equal(item.advantages[0], advantages[item.trajectory.id][0])
    assert stored[4].advantages is None


def test_lines_are_strict_json_with_offsets_for_other_tools(tmp_path: Path) -> None:
    items = [make_trajectory(seed=i) for i in range(3)]
    path = tmp_path / "x.jsonl"
    write_trajectories(path, items)
    from safetensors.numpy import load_file

    arrays = load_file(tokens_path(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, item in zip(lines, items, strict=True):
        ((start, end),) = line["segments"]
        np.testing.assert_array_equal(arrays["ids"][start:end], item.segments[0].ids)
        assert line["total_reward"] == pytest.approx(item.total_reward)


def test_data_that_json_cannot_hold_is_kept_in_words(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    data = {"deep": deep, "set": {1}, "array": np.arange(2), 3: "int key"}
    task = Task(id="t", data=data)  # type: ignore[arg-type]
    item = make_trajectory(seed=0, task=task, num_turns=2)
    item.turns[0].tool_calls[0].arguments["code"] = deep
    write_trajectories(tmp_path / "x.jsonl", [item])
    back = read_trajectories(tmp_path / "x.jsonl")[0].task.data
    assert back["set"] == {"$repr": "{1}"}
    assert back["array"] == [0, 1]
    assert back["3"] == "int key"
    assert "nested deeper" in json.dumps(back["deep"])


def test_arguments_that_look_like_a_mark_of_the_format_are_data(tmp_path: Path) -> None:
    item = make_trajectory(seed=0, num_turns=2)
    arguments: dict[str, Any] = {"a": {"$float": "x"}, "b": {"$float": 1}, "c": {"$float": [1]}}
    item.turns[0].tool_calls[0].arguments = arguments
    write_trajectories(tmp_path / "x.jsonl", [item])
    (back,) = read_trajectories(tmp_path / "x.jsonl")
    assert back.turns[0].tool_calls[0].arguments == arguments


def test_a_shape_error_names_the_trajectory(tmp_path: Path) -> None:
    item = make_trajectory(seed=0, identity="odd")
    segment = replace(item.segments[0], roles=np.zeros(1, np.int8))
    with pytest.raises(ValueError, match="'odd': roles"):
        write_trajectories(tmp_path / "x.jsonl", [replace(item, segments=[segment])])


def test_damaged_files_are_refused_by_name_and_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(DataError, match=r"x\.jsonl"):
        read_trajectories(path)
    write_trajectories(path, [make_trajectory(seed=0), make_trajectory(seed=1)])
    lines = path.read_text().splitlines()
    path.write_text(lines[0] + "\n" + lines[1][:50] + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_trajectories(path)
    tokens_path(path).write_bytes(b"\x00" * 20)
    with pytest.raises(DataError, match="tokens"):
        read_trajectories(path)


def test_a_tokens_file_of_another_step_is_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_trajectories(one, [make_trajectory(seed=0, num_turns=1)])
    write_trajectories(two, [make_trajectory(seed=1, num_turns=4)])
    tokens_path(two).write_bytes(tokens_path(one).read_bytes())
    with pytest.raises(DataError, match="offsets"):
        read_trajectories(two)
