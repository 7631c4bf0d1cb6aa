"""Which trajectories a report shows, and how: as blocks of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from agentrl.errors import DataError
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.token_view import (
    TokenBlock,
    TokenCell,
    TokenDecoder,
    token_blocks,
    visible,
)
from agentrl.telemetry.trajectory_io import StoredTrajectory, iter_stored
from agentrl.types import Message, Trajectory

MAX_TOKENS = 4_000
"""Of one trajectory on the page; the rest is in the file."""
_MAX_FAILURE_STEPS = 10
"""Steps that are searched backwards for a failed trajectory."""
_CELL = Markup('<span class="{}"{}>{}</span>')


@dataclass(slots=True, kw_only=True)
class ShownBlock:
    """One block as the page shows it."""

    name: str
    header: str
    html: Markup
    """Escaped token spans, or escaped text where there is no tokenizer."""


@dataclass(slots=True, kw_only=True)
class ShownTrajectory:
    """One trajectory as the page shows it."""

    why: str
    step: int
    trajectory: Trajectory
    advantage: float | None
    """Mean over sampled tokens."""
    blocks: list[ShownBlock]
    num_hidden_tokens: int


def open_decoder(run: RunDir) -> TokenDecoder:
    """Open the tokenizer of a run.

    Raises:
        DataError: it has none.
    """
    try:
        return TokenDecoder(run.model_path / "tokenizer.json")
    except DataError as error:
        raise DataError(f"{error}: trajectories are shown as messages, without tokens") from error


def last_step_trajectories(
    run: RunDir, decoder: TokenDecoder | None, chooser: random.Random
) -> list[ShownTrajectory]:
    """Best, worst and a random one of the last step.

    Raises:
        DataError: the file is damaged.
    """
    steps = run.trajectory_steps()
    if not steps:
        return []
    last = list(iter_stored(run.trajectories_path(steps[-1])))
    scored = sorted(
        (item for item in last if not item.trajectory.failed),
        key=lambda item: item.trajectory.total_reward,
    )
    picks = [("best", scored[-1])] if scored else []
    picks += [("worst", scored[0])] if len(scored) > 1 else []
    picks += [("random", chooser.choice(scored[1:-1]))] if len(scored) > 2 else []
    return [_shown(why, steps[-1], item, decoder) for why, item in picks]


def newest_failure(run: RunDir, decoder: TokenDecoder | None) -> list[ShownTrajectory]:
    """Return the newest failed trajectory, if one of the last steps has any.

    Raises:
        DataError: a file is damaged.
    """
    for step in reversed(run.trajectory_steps()[-_MAX_FAILURE_STEPS:]):
        for item in iter_stored(run.trajectories_path(step)):
            if item.trajectory.failed:
                return [_shown("failed", step, item, decoder)]
    return []


def first_step_trajectory(
    run: RunDir, decoder: TokenDecoder | None, chooser: random.Random
) -> list[ShownTrajectory]:
    """Return a random one of the first step, to compare with; none where the last is the first.

    Raises:
        DataError: the file is damaged.
    """
    steps = run.trajectory_steps()
    if len(steps) < 2:
        return []
    first = list(iter_stored(run.trajectories_path(steps[0])))
    pool = [item for item in first if not item.trajectory.failed] or first
    return [_shown("first step", steps[0], chooser.choice(pool), decoder)] if pool else []


def _shown(
    why: str, step: int, stored: StoredTrajectory, decoder: TokenDecoder | None
) -> ShownTrajectory:
    trajectory = stored.trajectory
    if decoder is None or not trajectory.segments:
        blocks, hidden = [_message_block(message) for message in trajectory.messages], 0
    else:
        blocks, hidden = _token_blocks(stored, decoder)
    return ShownTrajectory(
        why=why,
        step=step,
        trajectory=trajectory,
        advantage=_mean_advantage(stored),
        blocks=blocks,
        num_hidden_tokens=hidden,
    )


def _token_blocks(stored: StoredTrajectory, decoder: TokenDecoder) -> tuple[list[ShownBlock], int]:
    shown: list[ShownBlock] = []
    room, hidden = MAX_TOKENS, 0
    for block in token_blocks(stored, decoder):
        cells = block.tokens[:room]
        room -= len(cells)
        hidden += len(block.tokens) - len(cells)
        if cells:
            html = Markup().join(map(_cell_html, cells))
            shown.append(ShownBlock(name=block.name, header=_turn_header(block), html=html))
    return shown, hidden


def _message_block(message: Message) -> ShownBlock:
    text = visible(str(message.get("content", "")))
    return ShownBlock(name=str(message.get("role", "")), header="", html=Markup.escape(text))


def _turn_header(block: TokenBlock) -> str:
    turn = block.turn
    if turn is None:
        return ""
    parts = [f"turn {turn.index + 1}", str(turn.stop_reason), f"reward {turn.reward:g}"]
    counted = [
        (name, len(list(group)))
        for name, group in groupby(sorted(f"{r.name[:40]} {r.status}" for r in turn.tool_results))
    ]
    parts += [name if count == 1 else f"{name} ×{count}" for name, count in counted]
    parts += [f"{name} {seconds:.2f} s" for name, seconds in turn.timings_s.items()]
    parts += [f"error: {turn.error[:200]}"] if turn.error else []
    return " · ".join(parts)


def _cell_html(cell: TokenCell) -> Markup:
    classes = ["t", f"r{int(cell.role)}"]
    data = [str(cell.id)]
    if cell.special:
        classes.append("special")
    if "\n" in cell.text:
        classes.append("feed")
    if not cell.text:
        classes.append("part")
    if cell.logprob is not None:
        classes.append(f"p{_level(-cell.logprob, (0.05, 0.3, 1.0, 2.5))}")
        data += [f"{cell.logprob:.4f}", str(cell.version), "", ""]
    if cell.advantage is not None:
        sign = "n" if cell.advantage < 0 else "a"
        classes.append(f"{sign}{_level(abs(cell.advantage), (1e-9, 0.5, 1.0, 2.0))}")
        data[3] = f"{cell.advantage:.4f}"
    if cell.logprob is not None and cell.trainer_logprob is not None:
        difference = abs(cell.trainer_logprob - cell.logprob)
        classes.append(f"d{_level(difference, (1e-5, 1e-2, 1e-1, 0.5))}")
        data[4] = f"{cell.trainer_logprob:.4f}"
    return _CELL.format(" ".join(classes), Markup(' data-t="{}"').format("|".join(data)), cell.text)


def _level(value: float, edges: tuple[float, ...]) -> int:
    """Number of edges that ``value`` lies above: 0 for none."""
    return sum(value > edge for edge in edges)


def _mean_advantage(stored: StoredTrajectory) -> float | None:
    if stored.advantages is None:
        return None
    masks = [segment.loss_mask for segment in stored.trajectory.segments]
    count = sum(int(mask.sum()) for mask in masks)
    if not count:
        return None
    rows = zip(stored.advantages, masks, strict=True)
    return float(sum(float(values[mask].sum()) for values, mask in rows) / count)
