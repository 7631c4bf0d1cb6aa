"""What was cut: groups that no step waited for, by length and task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.telemetry.censoring import length_bucket
from agentrl.types import StopReason, TrajectoryGroup


def cut_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Count groups that were cut; nothing of none.

    Args:
        groups: those that were cut.

    Returns:
        ``cut/groups``; ``cut/ended`` and ``cut/finished``, trajectories of them that were ended and
        that were not; ``cut/tokens``, sampled in vain; ``cut/length/tokens<=<n>``, trajectories by
        what they had sampled, ``n`` a power of two; ``cut/task/<env>/<id>``, groups by task.
    """
    if not groups:
        return {}
    members = [member for group in groups for member in group.trajectories]
    lengths = Counter(length_bucket(member.num_sampled_tokens) for member in members)
    tasks = Counter(f"{group.env_id}/{group.task.id}" for group in groups)
    ended = sum(member.stop_reason is StopReason.CUT for member in members)
    return {
        "cut/groups": len(groups),
        "cut/ended": ended,
        "cut/finished": len(members) - ended,
        "cut/tokens": sum(member.num_sampled_tokens for member in members),
        **{f"cut/length/{bucket}": count for bucket, count in sorted(lengths.items())},
        **{f"cut/task/{task}": count for task, count in sorted(tasks.items())},
    }
