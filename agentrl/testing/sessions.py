"""Sessions with given masks and rewards, for tests of credit and batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.types import (
    Score,
    Segment,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def make_segment(mask: Sequence[int], *, logprob: float = -0.5) -> Segment:
    """Return a segment whose tokens are 0, 1, ...; 1 in ``mask`` is a sampled token."""
    sampled = np.array(mask, dtype=bool)
    return Segment(
        ids=np.arange(len(mask), dtype=np.int64),
        loss_mask=sampled,
        logprobs=np.where(sampled, logprob, 0.0).astype(np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        roles=np.where(sampled, 4, 1).astype(np.int8),
    )


def make_session(
    name: str,
    reward: float | None,
    masks: Sequence[Sequence[int]] = ((0, 1),),
    *,
    turn_rewards: Sequence[float] = (),
    anchors: Sequence[str] = (),
    parts: dict[str, float] | None = None,
    env_id: str = "e",
    sample_index: int = 0,
) -> Trajectory:
    """Return a session with one turn for every run of sampled tokens.

    Args:
        reward: of the outcome; None for a session that failed.
        masks: one per segment.
        turn_rewards, anchors: of the first turns; others get 0 and None.
    """
    segments = [make_segment(mask) for mask in masks]
    spans = [(index, *span) for index, mask in enumerate(masks) for span in _runs(mask)]
    turns = [
        Turn(
            index=number,
            segment=segment,
            start=start,
            end=end,
            stop_reason=StopReason.STOP,
            reward=turn_rewards[number] if number < len(turn_rewards) else 0.0,
            anchor=anchors[number] if number < len(anchors) else None,
        )
        for number, (segment, start, end) in enumerate(spans)
    ]
    return Trajectory(
        id=name,
        env_id=env_id,
        task=Task(id="t", data={}),
        group_id="g",
        sample_index=sample_index,
        attempt=0,
        seed=0,
        segments=segments,
        turns=turns,
        messages=[],
        stop_reason=StopReason.ENV_ERROR if reward is None else StopReason.TERMINATED,
        score=None
        if reward is None
        else Score(reward=reward, success=reward > 0, parts=parts or {}),
    )


def make_group(*members: Trajectory, index: int = 0) -> TrajectoryGroup:
    """Return a group of sessions."""
    return TrajectoryGroup(
        id=f"g-{index}",
        task=Task(id="t", data={}),
        env_id=members[0].env_id if members else "e",
        trajectories=list(members),
        policy_version=0,
        index=index,
    )


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Spans [start, end) of ones."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
