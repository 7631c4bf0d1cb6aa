"""From groups of trajectories to one ragged batch, and to what estimators see of it.

Nothing here has met a model yet: rewards, masks, turns. Failed members leave their group's
baseline and do not train; groups that the failure policy gave up are data for the record only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from agentrl.algo.config import CreditConfig
from agentrl.algo.credit import CreditBatch
from agentrl.batch import Batch
from agentrl.errors import TrainingError
from agentrl.rollout.buffer import failure_causes
from agentrl.types import BUILT_IN_REWARDS, Score, Trajectory, TrajectoryGroup, Turn


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """What one step trains on. Legend: ``S`` sessions, ``B`` rows, ``N`` tokens."""

    sessions: list[Trajectory]
    """Every trajectory with a score, in order of its group."""
    credit: CreditBatch
    """Their rewards and turns."""
    batch: Batch | None
    """One row per segment of a session that sampled anything: token fields ``ids`` (int64),
    ``loss_mask`` (bool), ``logprobs`` (of the engine, float32) and ``turn`` (int64, -1 where not
    sampled), all [N]; row fields ``session`` (int64 [B]), which indexes ``sessions``, and
    ``segment``, the row's place among the segments of its session. After credit was assigned,
    only the rows that train are left, with ``advantages`` and what the loss needs. None where
    nothing carries a gradient."""
    critic: Batch | None = None
    """What the critic trains on, once credit was assigned: the rows of all sessions whose estimator
    reads values. Token fields ``ids``, ``loss_mask`` (where it is trained), ``values`` (what it
    said) and ``value_targets``; row field ``session``."""
    advantages: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Trajectory id -> one float32 [T] array per segment, for the record."""
    sampled: Batch | None = None
    """The rows of all sessions, as ``batch`` holds them before credit is assigned."""
    trainer_logprobs: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Trajectory id -> one float32 [T] array per segment, for the record: what the trainer says of
    the sampled tokens before its first update, NaN where it was not asked."""
    trained_ids: frozenset[str] = frozenset()
    """Trajectories that entered the loss."""
    why_empty: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in one pass over the batch, context included."""
        return 0 if self.batch is None else self.batch.num_tokens

    @property
    def is_empty(self) -> bool:
        """True where nothing carries a gradient, for the policy or the critic."""
        return self.batch is None and self.critic is None


def assemble(groups: Sequence[TrajectoryGroup], configs: Mapping[str, CreditConfig]) -> TrainBatch:
    """Pack the scored trajectories of a step.

    Args:
        configs: by environment: how rewards are weighed.

    Raises:
        TrainingError: ``reward_weights`` names a part that a rubric did not give.
    """
    members = [
        (index, trajectory)
        for index, group in enumerate(groups)
        if not group.gave_up
        for trajectory in group.trajectories
        if not trajectory.failed
    ]
    sessions = [trajectory for _, trajectory in members]
    packed = _pack(sessions)
    return TrainBatch(
        sessions=sessions,
        credit=_credit_batch(groups, members, configs),
        batch=packed,
        sampled=packed,
        why_empty=failure_causes(groups),
    )


def weighted_rewards(trajectory: Trajectory, weights: Mapping[str, float]) -> dict[str, float]:
    """Return every named reward times its weight; they add up to the return.

    Raises:
        TrainingError: a weight names a part that the rubric did not give.
    """
    score = trajectory.score
    assert score is not None, "failed trajectories are left out before this"
    turns = [_turn_reward(turn, weights) for turn in trajectory.turns]
    rewards = {
        "outcome": weights.get("outcome", 0.0) * score.reward,
        "turn": float(sum(turn for turn, _ in turns)),
        "tool": float(sum(tool for _, tool in turns)),
    }
    for name, weight in weights.items():
        if name not in BUILT_IN_REWARDS:
            rewards[name] = weight * _part(score, name, trajectory)
    return rewards


def split_sessions(batch: Batch, num_parts: int, *, seed: int) -> list[Batch]:
    """Cut a batch into mini-batches of whole sessions with about equal numbers of tokens.

    Sessions are shuffled with ``seed`` and dealt to the part that has the fewest tokens so far.
    Parts that would stay empty (fewer sessions than parts) are left out.
    """
    tokens = Counter[int]()
    rows: dict[int, list[int]] = {}
    for row, session in enumerate(batch.rows["session"].tolist()):
        tokens[session] += int(batch.lengths[row])
        rows.setdefault(session, []).append(row)
    order = [list(rows)[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sizes = [0] * num_parts
    for session in order:
        smallest = sizes.index(min(sizes))
        parts[smallest] += rows[session]
        sizes[smallest] += tokens[session]
    return [batch.select(part) for part in parts if part]


def by_segment(
    sessions: Sequence[Trajectory], packed: Batch, values: torch.Tensor, *, missing: float
) -> dict[str, list[np.ndarray]]:
    """Bring a value per token into the shape of trajectories.

    Args:
        packed: rows of some of the sessions.
        values: float32 [N] of ``packed``.
        missing: what segments without a row are filled with.

    Returns:
        Id -> one float32 [T] array per segment, of the sessions with a row.
    """
    spans = packed.cu_seqlens.tolist()
    places = zip(packed.rows["session"].tolist(), packed.rows["segment"].tolist(), strict=True)
    record: dict[str, list[np.ndarray]] = {}
    for row, (session, segment) in enumerate(places):
        trajectory = sessions[session]
        if trajectory.id not in record:
            record[trajectory.id] = [
                np.full(len(part), missing, dtype=np.float32) for part in trajectory.segments
            ]
        record[trajectory.id][segment] = values[spans[row] : spans[row + 1]].numpy()
    return record


def _credit_batch(
    groups: Sequence[TrajectoryGroup],
    members: Sequence[tuple[int, Trajectory]],
    configs: Mapping[str, CreditConfig],
) -> CreditBatch:
    weights = [configs[t.env_id].reward_weights for _, t in members]
    named = [weighted_rewards(t, w) for (_, t), w in zip(members, weights, strict=True)]
    own = [_own_turns(trajectory) for _, trajectory in members]
    turn_rewards = [
        sum(_turn_reward(turn, w)) for turns, w in zip(own, weights, strict=True) for turn in turns
    ]
    # What is not of the session's own turns is earned at its end: the outcome, and of a branch
    # also what its prefix earned.
    returns = torch.tensor([sum(rewards.values()) for rewards in named], dtype=torch.float64)
    turns_per_session = torch.tensor([len(turns) for turns in own], dtype=torch.int64)
    paid = torch.tensor(turn_rewards, dtype=torch.float64)
    outcome = returns.index_add(0, torch.repeat_interleave(turns_per_session), -paid)
    return CreditBatch(
        group=torch.tensor([index for index, _ in members], dtype=torch.int64),
        turns_per_session=turns_per_session,
        tokens_per_turn=torch.tensor(
            [turn.end - turn.start for turns in own for turn in turns], dtype=torch.int64
        ),
        outcome_rewards=outcome,
        turn_rewards=paid,
        truncated=torch.tensor(
            [trajectory.stop_reason.is_truncation for _, trajectory in members], dtype=torch.bool
        ),
        named_rewards={
            name: torch.tensor([rewards.get(name, 0.0) for rewards in named], dtype=torch.float64)
            for name in dict.fromkeys(name for rewards in named for name in rewards)
        },
        named_weights={
            name: torch.tensor([w.get(name, 0.0) for w in weights], dtype=torch.float64)
            for name in dict.fromkeys(name for rewards in named for name in rewards)
        },
        anchors=_anchors(members, own),
        greedy_rewards=_greedy_rewards(groups, members, weights),
        **_branches(members),
    )


def _own_turns(trajectory: Trajectory) -> list[Turn]:
    """The turns sampled in this trajectory: those of a branch's prefix are the parent's."""
    return [turn for turn in trajectory.turns if not turn.inherited]


def _turn_reward(turn: Turn, weights: Mapping[str, float]) -> tuple[float, float]:
    tools = sum(result.reward for result in turn.tool_results)
    return weights.get("turn", 0.0) * turn.reward, weights.get("tool", 0.0) * tools


def _part(score: Score, name: str, trajectory: Trajectory) -> float:
    if name not in score.parts:
        known = ", ".join([*BUILT_IN_REWARDS, *score.parts])
        raise TrainingError(
            f"algo.reward_weights.{name}: the rubric of {trajectory.env_id!r} gave no part of that "
            f"name for trajectory {trajectory.id}; there are: {known}"
        )
    return score.parts[name]


def _anchors(members: Sequence[tuple[int, Trajectory]], own: Sequence[list[Turn]]) -> torch.Tensor:
    """Number the states by (group, anchor); -1 where the environment names none."""
    labels: dict[tuple[int, str], int] = {}
    numbers = [
        -1 if turn.anchor is None else labels.setdefault((group, turn.anchor), len(labels))
        for (group, _), turns in zip(members, own, strict=True)
        for turn in turns
    ]
    return torch.tensor(numbers, dtype=torch.int64)


def _greedy_rewards(
    groups: Sequence[TrajectoryGroup],
    members: Sequence[tuple[int, Trajectory]],
    weights: Sequence[Mapping[str, float]],
) -> torch.Tensor | None:
    if not members or any(groups[index].baseline is None for index, _ in members):
        return None
    return torch.tensor(
        [
            sum(weighted_rewards(baseline, w).values())
            for (index, _), w in zip(members, weights, strict=True)
            if (baseline := groups[index].baseline) is not None
        ],
        dtype=torch.float64,
    )


def _branches(members: Sequence[tuple[int, Trajectory]]) -> dict[str, torch.Tensor]:
    """Position of each session's parent; -1 for a trunk, and where the parent failed."""
    position = {(group, t.sample_index): number for number, (group, t) in enumerate(members)}
    parents = [
        -1 if t.parent is None else position.get((group, t.parent), -1) for group, t in members
    ]
    return {
        "parent": torch.tensor(parents, dtype=torch.int64),
        "branch_turn": torch.tensor([t.branch_turn for _, t in members], dtype=torch.int64),
    }


def _pack(sessions: Sequence[Trajectory]) -> Batch | None:
    segments = [
        (session, index, segment)
        for session, trajectory in enumerate(sessions)
        for index, segment in enumerate(trajectory.segments)
        if segment.loss_mask.any()
    ]
    if not segments:
        return None
    fields = {
        name: [torch.tensor(getattr(segment, name)) for _, _, segment in segments]
        for name in ("ids", "loss_mask", "logprobs")
    }
    fields["turn"] = [_turn_of_token(sessions[s], index) for s, index, _ in segments]
    rows = {
        "session": torch.tensor([session for session, _, _ in segments], dtype=torch.int64),
        "segment": torch.tensor([index for _, index, _ in segments], dtype=torch.int64),
    }
    return Batch.from_rows(fields, rows)


def _turn_of_token(trajectory: Trajectory, segment: int) -> torch.Tensor:
    turns = torch.full((len(trajectory.segments[segment]),), -1, dtype=torch.int64)
    for turn in _own_turns(trajectory):
        if turn.segment == segment:
            turns[turn.start : turn.end] = turn.index
    return turns
