"""The trainer's log-probabilities beside the engine's, of the tokens of a step.

What is compared has been scored by the weights that the step starts from: version ``step``. A
token that this version sampled shows mismatch alone; one of an older version shows what was
learned meanwhile as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algo.mismatch import ScoredTokens, mismatch_metrics
from agentrl.batch import Batch
from agentrl.train.assemble import TrainBatch, by_segment
from agentrl.types import Trajectory

Metrics = dict[str, Any]


def record_mismatch(
    train_batch: TrainBatch, packed: Batch, trainer_logprobs: Tensor, *, version: int
) -> Metrics:
    """Measure, and keep the trainer's log-probabilities for the record.

    Args:
        train_batch: whose ``trainer_logprobs`` are completed by those of the rows of ``packed``.
        packed: rows of its sessions.
        trainer_logprobs: float32 [N] of ``packed``; NaN where not scored.
        version: of the policy that scored.

    Returns:
        See :func:`~agentrl.algo.mismatch.mismatch_metrics`.
    """
    scored = ~trainer_logprobs.isnan() & (packed.tokens["turn"] >= 0)
    train_batch.trainer_logprobs |= by_segment(
        train_batch.sessions,
        packed,
        trainer_logprobs.masked_fill(~scored, torch.nan),
        missing=np.nan,
    )
    tokens = ScoredTokens(
        trainer=trainer_logprobs,
        engine=packed.tokens["logprobs"],
        turn=packed.tokens["turn"],
        position=packed.positions,
        lag=version - _versions(train_batch.sessions, packed),
    )
    return mismatch_metrics(tokens.select(scored))


def scored_where(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values``, float32 [N], as not scored (NaN) outside of ``mask``, bool [N].

    A value of the model's that is not a number becomes infinite: it was scored, and is wrong.
    """
    return values.nan_to_num(nan=-torch.inf, neginf=-torch.inf).masked_fill(~mask, torch.nan)


def some_sessions(packed: Batch, max_tokens: int) -> Batch:
    """Return the rows of sessions spread over the batch, of at most ``max_tokens`` tokens.

    At least one session, however long.
    """
    sessions = packed.rows["session"]
    names = sessions.unique().tolist()
    tokens = torch.zeros(max(names) + 1, dtype=torch.int64)
    tokens.index_add_(0, sessions, packed.lengths)
    wanted = max(1, min(len(names), int(max_tokens * len(names) / max(packed.num_tokens, 1))))
    spread = [names[i * len(names) // wanted] for i in range(wanted)]
    chosen, total = spread[:1], int(tokens[spread[0]])
    for name in spread[1:]:
        if total + int(tokens[name]) > max_tokens:
            break
        chosen.append(name)
        total += int(tokens[name])
    return packed.select(torch.isin(sessions, torch.tensor(chosen)).nonzero().squeeze(1))


def judged(metrics: Mapping[str, Any], distance: str) -> float | None:
    """Return a distance, such as ``k3_kl``, of the tokens that the present version sampled.

    None where none was measured: a token of an older version differs for a good reason too.
    """
    if "mismatch/current_fraction" in metrics:
        return metrics.get(f"mismatch/current/{distance}")
    return metrics.get(f"mismatch/{distance}")


def _versions(sessions: Sequence[Trajectory], packed: Batch) -> Tensor:
    """Return the version that sampled each token, int64 [N]; -1 where none did."""
    places = zip(packed.rows["session"].tolist(), packed.rows["segment"].tolist(), strict=True)
    rows = [sessions[session].segments[segment].policy_version for session, segment in places]
    return torch.from_numpy(np.concatenate(rows).astype(np.int64))
