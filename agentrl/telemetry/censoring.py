"""What became of every rollout: the censoring report.

Leaving out failed rollouts, or trying them again, biases training towards short and easy
episodes. So each step counts, per environment and per length, how many rollouts were trained on,
retried, masked or dropped, and why. The counts are flat metrics,
``censoring/<env>/<length>/<fate>/<why>``, so that they are stored, resumed and summed over a run
like any other.

The length is the number of sampled tokens up to the end or the failure: a failed rollout would
have become longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentrl.types import Trajectory

_PREFIX = "censoring/"
_FIRST_EDGE = 64


class Fate(StrEnum):
    """What the trainer did with a rollout."""

    TRAINED = "trained"
    RETRIED = "retried"
    """It failed and was replaced by a fresh attempt."""
    MASKED = "masked"
    """It stays in its group without loss and outside of the baseline."""
    DROPPED = "dropped"
    """It was left out with its group, for instance because all earned the same."""
    CUT = "cut"
    """No step waited for its group."""


@dataclass(slots=True, kw_only=True)
class CensoringRow:
    """Counts of one environment and one length bucket."""

    env_id: str
    max_tokens: int
    """Upper edge of the bucket, a power of two; the bucket begins above half of it."""
    counts: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    reasons: dict[str, int] = field(default_factory=dict)
    """Why rollouts were not trained on: ``"retried: env_timeout" -> 3``."""

    @property
    def total(self) -> int:
        """All rollouts, retried attempts included."""
        return sum(self.counts.values())

    @property
    def censored_fraction(self) -> float:
        """Share of rollouts that were not trained on."""
        return 1 - self.counts[Fate.TRAINED] / self.total if self.total else 0.0


def censoring_metrics(records: Iterable[tuple[Trajectory, Fate, str]]) -> dict[str, float]:
    """Count ``(trajectory, fate, why)`` records of one step.

    An empty ``why`` means the trajectory's own stop reason; give another where the trajectory is
    sound and something else decided (``zero_variance``, ``member_failed``).
    """
    counts: Counter[str] = Counter()
    for trajectory, fate, why in records:
        bucket = length_bucket(trajectory.num_sampled_tokens)
        reason = (why or trajectory.stop_reason).replace("/", "-")
        counts[f"{_PREFIX}{trajectory.env_id}/{bucket}/{fate}/{reason}"] += 1
    return dict(sorted(counts.items()))


def censoring_rows(lines: Iterable[Mapping[str, Any]]) -> list[CensoringRow]:
    """Sum the counts over metric lines; ordered by environment and length."""
    rows: dict[tuple[str, int], CensoringRow] = {}
    for line in lines:
        for key, value in line.items():
            if not key.startswith(_PREFIX):
                continue
            # From the right: ids of environments may hold slashes.
            env_id, bucket, fate, why = key.removeprefix(_PREFIX).rsplit("/", 3)
            edge = int(bucket.removeprefix("tokens<="))
            row = rows.setdefault((env_id, edge), CensoringRow(env_id=env_id, max_tokens=edge))
            row.counts[Fate(fate)] += int(value)
            if fate != Fate.TRAINED:
                cause = f"{fate}: {why}"
                row.reasons[cause] = row.reasons.get(cause, 0) + int(value)
    return [rows[key] for key in sorted(rows)]


def length_bucket(num_tokens: int) -> str:
    """Return ``tokens<=<n>`` with the smallest power of two, from 64 on, that is not below."""
    edge = _FIRST_EDGE
    while edge < num_tokens:
        edge *= 2
    return f"tokens<={edge}"
