"""Gives every sampled token of a step its advantage, and leaves out what cannot train."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentrl.algo.config import CreditConfig, GroupsConfig
from agentrl.algo.credit import Credit, CreditBatch, get_estimator
from agentrl.algo.group_baselines import group_statistics
from agentrl.algo.loss import MAX_TURN_KEYS
from agentrl.algo.ragged import position_in_segment
from agentrl.batch import Batch
from agentrl.train.assemble import TrainBatch, assemble, by_segment
from agentrl.train.estimator import run_estimator
from agentrl.types import TrajectoryGroup


def estimate(
    batch: CreditBatch, envs: Sequence[str], configs: Mapping[str, CreditConfig]
) -> Credit:
    """Run every environment's estimator on its own sessions.

    Args:
        envs: [S], the environment of each session.
        configs: by environment.

    Returns:
        ``advantages``, float32 [M]. Where an estimator reads values, ``value_targets`` (float32
        [M]) and ``value_mask`` (bool [M]: False at the tokens of all others); else None.

    Raises:
        TrainingError: an estimator gave something else than one finite number per token.
    """
    advantages, targets = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    session_of_token = batch.session_of_token
    for env in dict.fromkeys(envs):
        sessions = torch.tensor([name == env for name in envs])
        part = batch if bool(sessions.all()) else batch.select(sessions)
        tokens = sessions[session_of_token]
        found = run_estimator(part, configs[env])
        advantages[tokens] = found.advantages
        if found.value_targets is not None and found.value_mask is not None:
            targets[tokens], mask[tokens] = found.value_targets, found.value_mask
    if "values" not in needs_of(configs):
        return Credit(advantages)
    return Credit(advantages, value_targets=targets, value_mask=mask)


def reads_values(envs: Sequence[str], configs: Mapping[str, CreditConfig]) -> Tensor:
    """Mask of the sessions whose estimator asks for values, bool [S]; ``envs`` as above."""
    reading = {
        env for env, config in configs.items() if "values" in get_estimator(config.advantage).needs
    }
    return torch.tensor([env in reading for env in envs], dtype=torch.bool)


def needs_of(configs: Mapping[str, CreditConfig]) -> frozenset[str]:
    """Everything that the estimators of a run ask for."""
    return frozenset().union(*(get_estimator(c.advantage).needs for c in configs.values()))


def has_signal(group: TrajectoryGroup, configs: Mapping[str, CreditConfig]) -> bool:
    """Tell whether any advantage of a group is not 0, from its rewards alone."""
    alone = assemble([group], configs)
    if not len(alone.sessions):
        return False
    config = configs[group.env_id]
    if get_estimator(config.advantage).needs & {"values", "old_logprobs", "sum_pi_squared"}:
        returns = alone.credit.returns
        return bool(group_statistics(returns, alone.credit.group).has_signal.any())
    envs = [group.env_id] * len(alone.sessions)
    return bool(estimate(alone.credit, envs, configs).advantages.any())


def with_advantages(batch: TrainBatch, advantages: Tensor, choice: GroupsConfig) -> TrainBatch:
    """Attach advantages, float32 [M], and keep the rows of the groups that train."""
    if batch.batch is None:
        return replace(batch, why_empty=f"nothing was sampled; {batch.why_empty}")
    credit, packed = batch.credit, batch.batch
    mask = packed.tokens["loss_mask"]
    assert int(mask.sum()) == len(advantages), "turns and masks disagree"
    packed.tokens["advantages"] = torch.zeros(packed.num_tokens).masked_scatter(mask, advantages)
    chosen = _with_variance(credit, choice.variance_top_p)
    taught = _with_advantage(credit, advantages)
    if choice.drop_zero_advantage:
        chosen &= taught
    rows = chosen[packed.rows["session"]].nonzero().squeeze(1)
    num_flat, num_groups = len(credit.group[~taught].unique()), len(credit.group.unique())
    return replace(
        keep_rows(batch, packed, rows),
        advantages=_for_the_record(batch, packed),
        why_empty=f"{num_flat} of {num_groups} groups without a difference in reward; "
        + batch.why_empty,
    )


def keep_rows(batch: TrainBatch, packed: Batch, rows: Tensor) -> TrainBatch:
    """Return the batch with the ``rows``, int64, of ``packed`` alone; None where there is none."""
    return replace(
        batch,
        batch=packed.select(rows) if len(rows) else None,
        trained_ids=frozenset(
            batch.sessions[int(session)].id for session in packed.rows["session"][rows].unique()
        ),
    )


def credit_metrics(batch: TrainBatch, advantages: Tensor) -> dict[str, float]:
    """Where the signal comes from.

    Returns:
        ``credit/advantage_mass/turn_<k>``: share of the summed absolute advantage that falls on
        the k-th turns; ``credit/advantage_{mean,std}`` over tokens;
        ``credit/zero_advantage_fraction``: groups in which every advantage is 0;
        ``credit/reward/<name>``: mean weighted reward of each name, over the sessions in which it
        has a weight.
    """
    credit = batch.credit
    metrics: dict[str, float] = {}
    for name, values in credit.named_rewards.items():
        weighted = credit.named_weights[name] != 0  # in a mix, others do not know the name
        if bool(weighted.any()):
            metrics[f"credit/reward/{name}"] = float(values[weighted].mean())
    if not len(advantages):
        return metrics
    mass = _mass_by_turn(credit, advantages)
    total = float(mass.sum())
    for index, value in enumerate(mass[:MAX_TURN_KEYS].tolist()):
        metrics[f"credit/advantage_mass/turn_{index + 1}"] = value / total if total else 0.0
    flat = credit.group[~_with_advantage(credit, advantages)]
    metrics["credit/zero_advantage_fraction"] = len(flat.unique()) / len(credit.group.unique())
    metrics["credit/advantage_mean"] = float(advantages.mean())
    metrics["credit/advantage_std"] = float(advantages.std(correction=0))
    return metrics


def _mass_by_turn(credit: CreditBatch, advantages: Tensor) -> Tensor:
    """Sum of absolute advantages by the position of the turn in its episode; float32."""
    turn_index = position_in_segment(credit.turns_per_session)
    if credit.branch_turn is not None:
        turn_index = turn_index + credit.branch_turn[credit.session_of_turn]
    return torch.zeros(int(turn_index.max()) + 1).index_add(
        0, turn_index[credit.turn_of_token], advantages.abs()
    )


def of_sampled(packed: Batch, name: str) -> Tensor:
    """Return a token field at the sampled tokens, [M]."""
    return packed.tokens[name][packed.tokens["loss_mask"]]


def fields_to_infer(needs: Collection[str]) -> list[str]:
    """Return what the trainer's own forward pass has to give for estimators with ``needs``."""
    fields = ["logprobs"] if {"old_logprobs", "sum_pi_squared"} & set(needs) else []
    return fields + (["sum_pi_squared"] if "sum_pi_squared" in needs else [])


def _with_advantage(credit: CreditBatch, advantages: Tensor) -> Tensor:
    """Mask of the sessions in whose group an advantage is not 0: bool [S]."""
    labels, index = credit.group.unique(return_inverse=True)
    mass = torch.zeros(len(labels)).index_add(0, index[credit.session_of_token], advantages.abs())
    return (mass > 0)[index]


def _with_variance(credit: CreditBatch, top_p: float) -> Tensor:
    """Mask of the sessions whose groups hold the ``top_p`` share of the reward variance."""
    if top_p >= 1.0:
        return torch.ones(credit.num_sessions, dtype=torch.bool)
    labels, index = credit.group.unique(return_inverse=True)
    std = group_statistics(credit.returns, credit.group).std
    variance = torch.zeros(len(labels), dtype=torch.float64).index_copy(0, index, std.square())
    ordered, order = variance.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    keep = torch.zeros(len(labels), dtype=torch.bool)
    keep[order] = (before < top_p * ordered.sum()) & (ordered > 0)
    return keep[index]


def _for_the_record(batch: TrainBatch, packed: Batch) -> dict[str, list[np.ndarray]]:
    """Return each trajectory's advantages, one array per segment; zeros where none was sampled."""
    nothing = {
        trajectory.id: [np.zeros(len(part), dtype=np.float32) for part in trajectory.segments]
        for trajectory in batch.sessions
    }
    return nothing | by_segment(batch.sessions, packed, packed.tokens["advantages"], missing=0.0)
