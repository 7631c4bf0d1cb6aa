"""Trajectories in, flat metrics out. Pure functions.

Reward, success, turns and tokens are over *scored* trajectories: a failed one carries no reward
and its length is an accident. ``stop_reason/<name>`` is the fraction of all trajectories, failed
ones too; a name that did not occur has no key. ``tool/*`` are counts over all trajectories.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from agentrl.telemetry.censoring import Fate, censoring_metrics
from agentrl.telemetry.cut import cut_metrics
from agentrl.telemetry.environments import environment_metrics, is_flat
from agentrl.types import Score, ToolResult, ToolStatus, Trajectory, TrajectoryGroup

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNKNOWN_TOOL = "unknown"


def trajectory_metrics(
    trajectories: Sequence[Trajectory], *, tools: Collection[str] | None = None
) -> dict[str, float]:
    """Summarise one step.

    Args:
        trajectories: of any number of groups; may be empty.
        tools: the tools that exist. Calls of other names, which the model made up, are counted
            together under ``tool/unknown``. None: any well-formed name has its own key.

    Returns:
        ``trajectories/{count,failed}``, ``reward/{mean,std,min,max}``, ``reward_parts/<name>``,
        ``success/mean``, ``turns/mean``, ``response_tokens/{mean,sum}``, ``stop_reason/<name>``,
        ``tool/<name>/{calls,errors,timeouts,infra_errors,retries,breaker_open,truncated,repeated}``,
        ``timing_s/{tool,tool_p99}/<name>`` (seconds of a call: mean, and what 99 % stay below),
        ``tampering/<name>`` (shares of the scored ones; where there are any signs),
        ``render/drift`` and ``wall_clock_limited`` (counts). Means of nothing have no key.
    """
    scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
    return {
        "trajectories/count": len(trajectories),
        "trajectories/failed": len(trajectories) - len(scored),
        "response_tokens/sum": sum(trajectory.num_sampled_tokens for trajectory in trajectories),
        "render/drift": sum(trajectory.drift for trajectory in trajectories),
        "wall_clock_limited": sum(trajectory.wall_clock_limited for trajectory in trajectories),
        **_outcomes(scored),
        **_stop_reasons(trajectories),
        **_tool_calls(trajectories, tools),
    }


def rollout_metrics(
    groups: Sequence[TrajectoryGroup],
    *,
    trained_ids: Collection[str] | None = None,
    refilled: int = 0,
    tools: Collection[str] | None = None,
) -> dict[str, float]:
    """Summarise the groups of one step: trajectories, groups, environments, the censoring report.

    Groups that were cut are counted as such, and enter nothing else but the censoring report.

    Args:
        groups: as sampled; attempts that were retried stand in ``group.discarded``.
        trained_ids: ids of the trajectories that entered the loss; None: every scored one.
        refilled: groups that were sampled in place of others.
        tools: see :func:`trajectory_metrics`.
    """
    played = [group for group in groups if not group.cut]  # the cut ones' rewards are the quick's
    attempts = [item for group in played for item in (*group.trajectories, *group.discarded)]
    return {
        **trajectory_metrics(attempts, tools=tools),
        **group_metrics(played, trained_ids=trained_ids, refilled=refilled),
        **environment_metrics(played),
        **cut_metrics([group for group in groups if group.cut]),
        **censoring_metrics(_fates(groups, trained_ids)),
    }


def group_metrics(
    groups: Sequence[TrajectoryGroup],
    *,
    trained_ids: Collection[str] | None = None,
    refilled: int = 0,
) -> dict[str, float]:
    """``group/{zero_advantage_fraction,dropped,refilled}``.

    With greedy baselines also ``group/greedy_failed`` (a count) and ``reward/greedy_mean``; with
    trees ``group/branched_fraction``, the share of members that branched off from another.
    A group has zero advantage where all its scored members earned the same, and is dropped where
    none of its members entered the loss. Groups without a scored member are left out of the
    fraction.
    """
    flat = [known for group in groups if (known := is_flat(group)) is not None]
    dropped = sum(not any(_is_trained(m, trained_ids) for m in _scored(group)) for group in groups)
    metrics: dict[str, float] = {"group/dropped": dropped, "group/refilled": refilled}
    if flat:
        metrics["group/zero_advantage_fraction"] = sum(flat) / len(flat)
    members = [member for group in groups for member in group.trajectories]
    if branched := sum(member.parent is not None for member in members):
        metrics["group/branched_fraction"] = branched / len(members)
    baselines = [group.baseline for group in groups if group.baseline is not None]
    if baselines:
        scored = [baseline for baseline in baselines if baseline.score is not None]
        metrics["group/greedy_failed"] = len(baselines) - len(scored)
        if scored:
            metrics["reward/greedy_mean"] = sum(b.total_reward for b in scored) / len(scored)
    return metrics


def staleness_metrics(trajectories: Iterable[Trajectory], current_version: int) -> dict[str, float]:
    """``staleness/{mean,max,token_mean}``: versions that what was sampled lags behind.

    ``mean`` and ``max`` are over trajectories, each as old as its oldest token; ``token_mean`` is
    over tokens.
    """
    sampled_by = [
        np.concatenate([s.policy_version[s.loss_mask] for s in trajectory.segments])
        for trajectory in trajectories
        if trajectory.num_sampled_tokens
    ]
    if not sampled_by:
        return {}
    oldest = [current_version - int(versions.min()) for versions in sampled_by]
    return {
        "staleness/mean": float(np.mean(oldest)),
        "staleness/max": float(max(oldest)),
        "staleness/token_mean": float(current_version - np.concatenate(sampled_by).mean()),
    }


def throughput_metrics(
    metrics: Mapping[str, float], *, trained_tokens: int | None = None
) -> dict[str, float]:
    """``throughput/{rollout_tokens_per_s,train_tokens_per_s}`` of a finished step.

    Tokens are sampled while a step collects; where sampling runs ahead, during all of it.

    Args:
        metrics: of the step, with ``response_tokens/sum`` and the timings of the meter.
        trained_tokens: tokens that went through the update, context included.
    """
    sampling = "timing_s/step" if metrics.get("staleness/max") else "timing_s/collect"
    rates = {
        "rollout": (metrics.get("response_tokens/sum"), metrics.get(sampling)),
        "train": (trained_tokens, metrics.get("timing_s/update")),
    }
    return {
        f"throughput/{name}_tokens_per_s": tokens / seconds
        for name, (tokens, seconds) in rates.items()
        if tokens is not None and seconds
    }


def _fates(
    groups: Sequence[TrajectoryGroup], trained_ids: Collection[str] | None
) -> Iterator[tuple[Trajectory, Fate, str]]:
    for group in groups:
        why = "zero_variance" if is_flat(group) else "group_dropped"
        for member in group.trajectories:
            if group.cut:
                yield member, Fate.CUT, ""
            elif member.score is None:
                yield member, Fate.MASKED, ""
            elif _is_trained(member, trained_ids):
                yield member, Fate.TRAINED, ""
            else:
                yield member, Fate.DROPPED, why
        for attempt in group.discarded:
            yield attempt, Fate.RETRIED, ""


def _scored(group: TrajectoryGroup) -> list[Trajectory]:
    return [member for member in group.trajectories if member.score is not None]


def _is_trained(member: Trajectory, trained_ids: Collection[str] | None) -> bool:
    return trained_ids is None or member.id in trained_ids


def _outcomes(scored: Sequence[Trajectory]) -> dict[str, float]:
    if not scored:
        return {}
    rewards = np.array([trajectory.total_reward for trajectory in scored], np.float64)
    scores = [trajectory.score for trajectory in scored if trajectory.score is not None]
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            parts.setdefault(name, []).append(value)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **{f"reward_parts/{name}": float(np.mean(values)) for name, values in parts.items()},
        **_tampering(scores),
        "success/mean": sum(score.success for score in scores) / len(scores),
        "turns/mean": sum(len(trajectory.turns) for trajectory in scored) / len(scored),
        "response_tokens/mean": sum(item.num_sampled_tokens for item in scored) / len(scored),
    }


def _tampering(scores: Sequence[Score]) -> dict[str, float]:
    """Shares of the trajectories in which each pattern was seen, and any of them."""
    counts = Counter(name for score in scores for name in set(score.tampering))
    if not counts:
        return {}
    counts["any"] = sum(bool(score.tampering) for score in scores)
    return {f"tampering/{name}": count / len(scores) for name, count in sorted(counts.items())}


def _stop_reasons(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(trajectory.stop_reason for trajectory in trajectories)
    return {
        f"stop_reason/{reason}": count / len(trajectories)
        for reason, count in sorted(counts.items())
    }


def _tool_calls(
    trajectories: Sequence[Trajectory], tools: Collection[str] | None
) -> dict[str, float]:
    calls: dict[str, list[ToolResult]] = {}
    repeated = Counter[str]()
    for trajectory in trajectories:
        seen = set[str]()
        for turn in trajectory.turns:
            for call, result in zip(turn.tool_calls, turn.tool_results, strict=False):
                key = f"{call.name} {call.arguments!r}"
                is_known = _TOOL_NAME.fullmatch(result.name) and (
                    tools is None or result.name in tools
                )
                name = result.name if is_known else UNKNOWN_TOOL
                if not turn.inherited:
                    calls.setdefault(name, []).append(result)
                    repeated[name] += key in seen
                seen.add(key)
    metrics: dict[str, float] = {}
    for name, results in sorted(calls.items()):
        statuses = Counter(result.status for result in results)
        seconds = np.array([result.duration_s for result in results], np.float64)
        numbers = {
            "calls": len(results),
            "errors": statuses[ToolStatus.ERROR],
            "timeouts": statuses[ToolStatus.TIMEOUT],
            "infra_errors": statuses[ToolStatus.INFRA_ERROR],
            "retries": sum(result.retries for result in results),
            "breaker_open": sum(result.breaker_open for result in results),
            "truncated": sum(result.truncated_tokens > 0 for result in results),
            # Word for word an earlier call of its trajectory: a bonus per call breeds these.
            "repeated": repeated[name],
        }
        metrics |= {f"tool/{name}/{key}": value for key, value in numbers.items()}
        metrics[f"timing_s/tool/{name}"] = float(seconds.mean())
        metrics[f"timing_s/tool_p99/{name}"] = float(np.quantile(seconds, 0.99))
    return metrics
