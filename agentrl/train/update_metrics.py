"""Puts the metrics of a step's updates together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Metrics = dict[str, Any]

_OWN_SECTION = "correction/"


def combine(updates: Sequence[Mapping[str, Any]], *, role: str) -> Metrics:
    """Return the metrics of all updates that one engine made in a step.

    Args:
        updates: what every mini-batch gave, in order.
        role: the section of metrics that name none: ``actor`` or ``critic``.

    Returns:
        Under ``<role>/`` and ``correction/`` means over the updates, ``*_max`` their maximum.
        ``<role>/updates`` counts those that had a token to train on, ``<role>/skipped_updates``
        those of them whose gradient was not finite.
    """
    metrics: Metrics = {
        f"{role}/updates": sum(update.get("micro_batches", 1) > 0 for update in updates),
        f"{role}/skipped_updates": int(sum(update.get("skipped", 0) for update in updates)),
    }
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        key = name if name.startswith(_OWN_SECTION) else f"{role}/{name}"
        if name.endswith("_max"):
            metrics[key] = max(values)
        elif name != "skipped":
            metrics[key] = sum(values) / len(values)
    return metrics
