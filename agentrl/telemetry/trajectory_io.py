"""Trajectories on disk: a JSON line each, and one safetensors file with everything per token.

``step_NNNNNN.jsonl`` holds one trajectory per line: messages, turns, rewards, statuses, and
``segments``, the ``[start, end)`` span of every segment in the flat arrays of
``step_NNNNNN.tokens.safetensors``. Those arrays, of shape [N] with N the tokens of all segments:

====================  =======  ==================================================
``ids``               int64    token ids
``loss_mask``         bool     1 exactly on sampled tokens
``logprobs``          float32  of sampled tokens, 0 elsewhere
``policy_version``    int32    of sampled tokens, -1 elsewhere
``roles``             int8     :class:`agentrl.types.TokenRole`
``advantages``        float32  0 where the line says ``"advantages": false``
``trainer_logprobs``  float32  what the trainer says of the sampled tokens before
                               its update; NaN where it was not asked
====================  =======  ==================================================

JSON has no word for non-finite numbers: they are written as ``{"$float": "nan"}``. Task data that
JSON cannot hold at all is written as ``{"$repr": "..."}`` and read back in that form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from agentrl.errors import DataError
from agentrl.telemetry.files import atomic_write
from agentrl.types import (
    Message,
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

PerToken = Mapping[str, Sequence[np.ndarray]]
"""Trajectory id -> one float32 [T] array per segment."""

_FIELDS: dict[str, type[np.generic]] = {
    "ids": np.int64,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "policy_version": np.int32,
    "roles": np.int8,
    "advantages": np.float32,
    "trainer_logprobs": np.float32,
}
_MADE_BY_TRAINER = {"advantages": 0.0, "trainer_logprobs": np.nan}
"""Fields that no segment has, and what stands there for a trajectory without."""
_PLAIN_FIELDS = [
    name
    for name in Trajectory.__dataclass_fields__
    if name not in ("segments", "turns", "task", "score", "stop_reason", "messages")
]
_MAX_DEPTH = 64
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory with what the trainer made of it."""

    trajectory: Trajectory
    advantages: list[np.ndarray] | None
    """One float32 [T] array per segment; None where none was computed."""
    trainer_logprobs: list[np.ndarray] | None = None
    """One float32 [T] array per segment, NaN where not scored; None where no token was."""


def tokens_path(path: Path) -> Path:
    """Return the tokens file that belongs to a trajectories file."""
    return path.with_suffix(".tokens.safetensors")


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    advantages: PerToken | None = None,
    *,
    trainer_logprobs: PerToken | None = None,
) -> None:
    """Write both files atomically; the JSON lines last, so that their offsets always resolve.

    Args:
        path: of the JSON lines.
        trajectories: in the order in which they are read back.
        advantages: by trajectory.
        trainer_logprobs: by trajectory; NaN where not scored.

    Raises:
        OSError: the disk is full or read-only.
        ValueError: an array has another length than the ids of its segment.
    """
    made = {"advantages": advantages or {}, "trainer_logprobs": trainer_logprobs or {}}
    lines: list[str] = []
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _FIELDS}
    offset = 0
    for trajectory in trajectories:
        spans = []
        for index, segment in enumerate(trajectory.segments):
            extra = {
                name: known[trajectory.id][index]
                if trajectory.id in known
                else np.full(len(segment), _MADE_BY_TRAINER[name], np.float32)
                for name, known in made.items()
            }
            _append(columns, segment, extra, trajectory.id)
            spans.append([offset, offset + len(segment)])
            offset += len(segment)
        has_advantages = trajectory.id in made["advantages"]
        lines.append(_dumps(_to_json(trajectory, spans, has_advantages=has_advantages)))
    arrays = {
        name: np.concatenate(parts).astype(_FIELDS[name]) if parts else np.zeros(0, _FIELDS[name])
        for name, parts in columns.items()
    }
    atomic_write(tokens_path(path), save(arrays, {"format": "agentrl-trajectories-1"}))
    atomic_write(path, "".join(line + "\n" for line in lines))


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read what :func:`write_trajectories` wrote.

    Raises:
        DataError: a file is missing or damaged.
    """
    return [stored.trajectory for stored in iter_stored(path)]


def iter_stored(path: Path) -> Iterator[StoredTrajectory]:
    """Yield trajectories with their advantages, parsing one line at a time.

    Raises:
        DataError: a file is missing or damaged.
    """
    try:
        raw_lines = path.read_bytes().split(b"\n")
        arrays = load_file(tokens_path(path))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: cannot be read with its tokens file {tokens_path(path).name!r} "
            f"({type(error).__name__}: {error}); both files are needed"
        ) from error
    for number, raw in enumerate(raw_lines, start=1):
        if raw.strip():
            try:
                yield _from_json(json.loads(raw, object_hook=_untag), arrays)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise DataError(
                    f"{path}: line {number} is no trajectory of this format "
                    f"({type(error).__name__}: {error})"
                ) from error


def _append(
    columns: dict[str, list[np.ndarray]],
    segment: Segment,
    extra: Mapping[str, np.ndarray],
    name: str,
) -> None:
    for field in _FIELDS:
        values = extra[field] if field in extra else getattr(segment, field)
        if np.shape(values) != (len(segment),):
            raise ValueError(
                f"trajectory {name!r}: {field} has shape {np.shape(values)}, "
                f"its segment has {len(segment)} tokens"
            )
        columns[field].append(np.asarray(values))


def _to_json(
    trajectory: Trajectory, spans: list[list[int]], *, has_advantages: bool
) -> dict[str, Any]:
    line = {name: getattr(trajectory, name) for name in _PLAIN_FIELDS}
    task, score = trajectory.task, trajectory.score
    return line | {
        "stop_reason": trajectory.stop_reason,
        "messages": trajectory.messages,
        "task": {"id": task.id, "data": dict(task.data), "tags": dict(task.tags)},
        "score": None
        if score is None
        else {
            "reward": score.reward,
            "success": score.success,
            "parts": dict(score.parts),
            "tampering": list(score.tampering),
        },
        "turns": [_shallow(turn) for turn in trajectory.turns],
        "segments": spans,
        "advantages": has_advantages,
        # For people who read the lines with other tools; ignored when read back.
        "total_reward": trajectory.total_reward,
        "num_sampled_tokens": trajectory.num_sampled_tokens,
    }


def _shallow(turn: Turn) -> dict[str, Any]:
    # Not `asdict`, which recurses through arguments of any depth.
    line = {name: getattr(turn, name) for name in Turn.__dataclass_fields__}
    line["tool_calls"] = [_fields(call) for call in turn.tool_calls]
    line["tool_results"] = [_fields(result) for result in turn.tool_results]
    return line


def _fields(value: ToolCall | ToolResult) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _from_json(line: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> StoredTrajectory:
    spans = [slice(start, end) for start, end in line["segments"]]
    if any(span.stop > len(arrays["ids"]) for span in spans):
        raise IndexError("offsets lie outside of the tokens file")
    trajectory = Trajectory(
        # Lines written before a field with a default was added lack it.
        **{name: line[name] for name in _PLAIN_FIELDS if name in line},
        task=Task(**line["task"]),
        score=None if line["score"] is None else Score(**line["score"]),
        stop_reason=StopReason(line["stop_reason"]),
        messages=cast("list[Message]", line["messages"]),
        turns=[_turn(turn) for turn in line["turns"]],
        segments=[
            Segment(
                ids=arrays["ids"][span],
                loss_mask=arrays["loss_mask"][span],
                logprobs=arrays["logprobs"][span],
                policy_version=arrays["policy_version"][span],
                roles=arrays["roles"][span],
            )
            for span in spans
        ],
    )
    advantages = [arrays["advantages"][span] for span in spans] if line["advantages"] else None
    scored = None
    if "trainer_logprobs" in arrays:  # files written before there was this field lack it
        scored = [arrays["trainer_logprobs"][span] for span in spans]
        scored = None if all(np.isnan(part).all() for part in scored) else scored
    return StoredTrajectory(trajectory=trajectory, advantages=advantages, trainer_logprobs=scored)


def _turn(line: dict[str, Any]) -> Turn:
    return Turn(
        **{
            **line,
            "stop_reason": StopReason(line["stop_reason"]),
            "tool_calls": [ToolCall(**call) for call in line["tool_calls"]],
            "tool_results": [
                ToolResult(**{**result, "status": ToolStatus(result["status"])})
                for result in line["tool_results"]
            ],
        }
    )


def _dumps(line: dict[str, Any]) -> str:
    try:
        text = json.dumps(line, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        text = json.dumps(_tag(line), allow_nan=False, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can hold
        return json.dumps(json.loads(text))
    return text


def _tag(value: Any, depth: int = 0) -> Any:
    """Replace what JSON cannot hold by something it can."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    if depth > _MAX_DEPTH:
        return {"$repr": f"nested deeper than {_MAX_DEPTH} levels"}
    if isinstance(value, Mapping):
        return {str(key): _tag(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tag(item, depth + 1) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _tag(value.tolist(), depth + 1)
    return {"$repr": repr(value)[:10_000]}


def _untag(value: dict[str, Any]) -> Any:
    # Any other value of that name is data: a model may call a tool with whatever it likes.
    is_ours = value.keys() == {"$float"} and value["$float"] in _NOT_FINITE
    return float(value["$float"]) if is_ours else value
