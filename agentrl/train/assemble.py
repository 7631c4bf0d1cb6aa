"""From groups of trajectories to one ragged batch with token-level advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from agentrl.algo.credit import ESTIMATORS, broadcast, has_signal
from agentrl.batch import Batch
from agentrl.rollout.buffer import failure_causes
from agentrl.train.config import AlgoConfig
from agentrl.types import Segment, Trajectory, TrajectoryGroup


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """What one step trains on.

    ``batch`` has one row per segment of a session that carries signal: token fields ``ids``
    (int64), ``loss_mask`` (bool), ``logprobs`` (of the behaviour policy, float32) and
    ``advantages`` (float32), all [N]; row field ``session`` (int64 [B]) numbers trajectories.
    """

    batch: Batch | None
    advantages: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Trajectory id -> one float32 [T] array per segment, for the record."""
    trained_ids: frozenset[str] = frozenset()
    """Trajectories that entered the loss."""
    why_empty: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in one pass over the batch, context included."""
        return 0 if self.batch is None else self.batch.num_tokens

    @property
    def is_empty(self) -> bool:
        """True where nothing carries a gradient."""
        return self.batch is None


def assemble(groups: Sequence[TrajectoryGroup], config: AlgoConfig) -> TrainBatch:
    """Give every sampled token its advantage.

    Failed members leave the group's baseline and do not train. Groups in which every member
    earned the same are left out where ``algo.drop_zero_variance`` says so: their advantage is 0,
    and their tokens would only dilute the mean.
    """
    sessions = [
        (index, trajectory)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if not trajectory.failed
    ]
    returns = torch.tensor(
        [weighted_return(trajectory, config) for _, trajectory in sessions], dtype=torch.float32
    )
    group_of = torch.tensor([index for index, _ in sessions], dtype=torch.int64)
    advantages = ESTIMATORS[config.advantage](returns, group_of, normalize_std=config.normalize_std)
    signal = has_signal(returns, group_of)
    chosen = [
        number
        for number, (_, trajectory) in enumerate(sessions)
        if trajectory.num_sampled_tokens > 0
        and (bool(signal[number]) or not config.drop_zero_variance)
    ]
    with_signal = set(group_of[signal].tolist())
    return TrainBatch(
        batch=_pack([sessions[i][1] for i in chosen], advantages[chosen]) if chosen else None,
        advantages={
            trajectory.id: [_on_sampled(segment, float(value)) for segment in trajectory.segments]
            for (_, trajectory), value in zip(sessions, advantages, strict=True)
        },
        trained_ids=frozenset(sessions[number][1].id for number in chosen),
        why_empty=_why_empty(groups, len(groups) - len(with_signal)),
    )


def weighted_return(trajectory: Trajectory, config: AlgoConfig) -> float:
    """Outcome reward plus the rewards of the turns, each with its weight."""
    if trajectory.score is None:
        return 0.0
    turns = sum(turn.reward for turn in trajectory.turns)
    return (
        config.outcome_reward_weight * trajectory.score.reward + config.turn_reward_weight * turns
    )


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


def _pack(trajectories: Sequence[Trajectory], advantages: torch.Tensor) -> Batch:
    segments = [
        (session, segment)
        for session, trajectory in enumerate(trajectories)
        for segment in trajectory.segments
    ]
    batch = Batch.from_rows(
        {
            "ids": [torch.from_numpy(segment.ids) for _, segment in segments],
            "loss_mask": [torch.from_numpy(segment.loss_mask) for _, segment in segments],
            "logprobs": [torch.from_numpy(segment.logprobs) for _, segment in segments],
        },
        {"session": torch.tensor([session for session, _ in segments], dtype=torch.int64)},
    )
    session_of_token = batch.rows["session"][batch.row_of_token]
    batch.tokens["advantages"] = broadcast(advantages, session_of_token, batch.tokens["loss_mask"])
    return batch


def _on_sampled(segment: Segment, value: float) -> np.ndarray:
    return np.where(segment.loss_mask, np.float32(value), np.float32(0.0))


def _why_empty(groups: Sequence[TrajectoryGroup], num_flat: int) -> str:
    return (
        f"{num_flat} of {len(groups)} groups without a difference in reward; "
        f"{failure_causes(groups)}"
    )
