"""Where engine and trainer part: the tokens of stored trajectories on which they disagree.

Once a token is scored otherwise the context of all later ones may be read otherwise too, so of a
trajectory the *first* token above a threshold says most; the one with the largest difference says
how bad it gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.errors import DataError
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.token_view import TokenDecoder, visible
from agentrl.telemetry.trajectory_io import StoredTrajectory, iter_stored
from agentrl.types import Segment, Trajectory, Turn

DEFAULT_THRESHOLD = 0.1
"""Nats; rounding of bfloat16 stays below it for most tokens."""


@dataclass(slots=True, frozen=True, kw_only=True)
class TokenDivergence:
    """A sampled token with what both say of it."""

    segment: int
    position: int
    """Index in the segment."""
    turn: int
    """Index of the turn, from 0."""
    index: int
    """Index among the tokens of the turn, from 0."""
    token_id: int
    version: int
    """Of the policy that sampled it."""
    engine: float
    """Log-probability at the time of sampling."""
    trainer: float
    """Log-probability before the update."""
    text: str = ""
    """Of the token, where there is a tokenizer."""

    @property
    def difference(self) -> float:
        """Trainer's minus engine's log-probability, in nats."""
        return self.trainer - self.engine


@dataclass(slots=True, frozen=True, kw_only=True)
class TrajectoryDivergence:
    """How far engine and trainer are apart in one trajectory."""

    id: str
    num_tokens: int
    """Tokens that both have scored."""
    abs_mean: float
    """Mean absolute difference, in nats."""
    worst: TokenDivergence
    """The token with the largest difference; the first of equal ones."""
    first: TokenDivergence | None
    """The first token whose difference is above the threshold."""


def run_divergences(
    run: RunDir,
    step: int,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    top: int = 10,
    decoder: TokenDecoder | None = None,
) -> list[TrajectoryDivergence]:
    """Compare the trajectories of a step.

    Returns:
        the ``top`` that are furthest apart, furthest first.

    Raises:
        DataError: the step's files are missing or damaged.
    """
    if step not in run.trajectory_steps():
        raise DataError(
            f"{str(run.path)!r} holds no trajectories of step {step}; there are "
            f"{run.trajectory_steps() or 'none'} (trainer.trajectories decides what is stored)"
        )
    found = sorted(
        divergences(iter_stored(run.trajectories_path(step)), threshold=threshold),
        key=lambda item: -_size(item.worst),
    )[:top]
    return [_with_texts(item, decoder) for item in found] if decoder is not None else found


def quiet_decoder(run: RunDir) -> TokenDecoder | None:
    """Open the tokenizer of a run; None where it has none that can be used."""
    try:
        return TokenDecoder(run.model_path / "tokenizer.json")
    except DataError:
        return None


def divergences(
    stored: Iterable[StoredTrajectory], *, threshold: float = DEFAULT_THRESHOLD
) -> Iterator[TrajectoryDivergence]:
    """Compare trajectories; those of which the trainer scored nothing are left out."""
    for item in stored:
        found = _compare(item.trajectory, item.trainer_logprobs, threshold)
        if found is not None:
            yield found


def _compare(
    trajectory: Trajectory, scored: Sequence[np.ndarray] | None, threshold: float
) -> TrajectoryDivergence | None:
    """Look at the tokens that both have scored, in the order in which they were sampled."""
    if scored is None:
        return None
    first: TokenDivergence | None = None
    worst: tuple[float, Turn, int] | None = None
    total, count = 0.0, 0
    for turn in (turn for turn in trajectory.turns if not turn.inherited):
        positions, sizes = _sizes(trajectory.segments[turn.segment], scored[turn.segment], turn)
        if not len(sizes):
            continue
        total, count = total + float(sizes.sum()), count + len(sizes)
        largest = int(sizes.argmax())
        if worst is None or sizes[largest] > worst[0]:
            worst = float(sizes[largest]), turn, int(positions[largest])
        above = np.flatnonzero(sizes > threshold)
        if first is None and len(above):
            first = _token(trajectory, scored, turn, int(positions[above[0]]))
    if worst is None:
        return None
    return TrajectoryDivergence(
        id=trajectory.id,
        num_tokens=count,
        abs_mean=total / count,
        worst=_token(trajectory, scored, *worst[1:]),
        first=first,
    )


def _sizes(segment: Segment, scored: np.ndarray, turn: Turn) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of a turn's tokens that both have scored, and how far they differ.

    What is no number (of a log-probability of -inf twice) counts as infinite.
    """
    span = np.arange(turn.start, turn.end)
    positions = span[~np.isnan(scored[span]) & segment.loss_mask[span]]
    with np.errstate(invalid="ignore"):
        sizes = np.abs(scored[positions].astype(np.float64) - segment.logprobs[positions])
    return positions, np.where(np.isnan(sizes), np.inf, sizes)


def _token(
    trajectory: Trajectory, scored: Sequence[np.ndarray], turn: Turn, position: int
) -> TokenDivergence:
    segment = trajectory.segments[turn.segment]
    return TokenDivergence(
        segment=turn.segment,
        position=position,
        turn=turn.index,
        index=position - turn.start,
        token_id=int(segment.ids[position]),
        version=int(segment.policy_version[position]),
        engine=float(segment.logprobs[position]),
        trainer=float(scored[turn.segment][position]),
    )


def _size(token: TokenDivergence) -> float:
    return np.inf if np.isnan(token.difference) else abs(token.difference)


def _with_texts(item: TrajectoryDivergence, decoder: TokenDecoder) -> TrajectoryDivergence:
    def named(token: TokenDivergence) -> TokenDivergence:
        return replace(token, text=visible(decoder.texts([token.token_id])[0]))

    first = None if item.first is None else named(item.first)
    return replace(item, worst=named(item.worst), first=first)
