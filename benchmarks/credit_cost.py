"""CPU time of credit: every estimator on one batch of a million sampled tokens, on one core.

Columns, per estimator: milliseconds of CPU time of the one thread (other processes may share the
machine), median of the repeats; with ``--wall``, of wall-clock time:

* ``ours``: the estimator, from a fresh batch (nothing derived is kept from an earlier call).
* ``verl``: verl's function of the same name on the same rewards, padded to [B, T] beforehand, in
  the same process; ``-`` where verl is not installed or has none.
* ``limit``: one read of every tensor of tokens that the estimator needs and one write of what it
  gives, as copies: no implementation can be faster.

Run: ``python benchmarks/credit_cost.py [--tokens 1000000] [--sequences 4096] [--json]``;
the column of verl needs an environment with verl and ``VERL_FORCE_DEVICE=cpu``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("VERL_FORCE_DEVICE", "cpu")

import numpy as np
import torch

from agentrl.algo.credit import ESTIMATORS, Credit, CreditBatch, get_estimator

TOKEN_FIELDS = {
    "values": ("values",),
    "old_logprobs": ("old_logprobs",),
    "sum_pi_squared": ("sum_pi_squared",),
}
"""What is declared -> fields of tokens that are read for it."""


def make_batch(num_tokens: int, num_sequences: int, seed: int) -> CreditBatch:
    """Ragged sessions in groups of 8: 1 to 8 turns each, lengths spread by a factor of 20."""
    rng = torch.Generator().manual_seed(seed)
    turns_per_session = torch.randint(1, 9, (num_sequences,), generator=rng)
    num_turns = int(turns_per_session.sum())
    weight = torch.rand(num_turns, generator=rng, dtype=torch.float64).square() + 0.05
    tokens_per_turn = (weight / weight.sum() * num_tokens).long()
    tokens_per_turn[-1] += num_tokens - tokens_per_turn.sum()
    normal = torch.randn(num_tokens, generator=rng)
    outcome = torch.randint(0, 2, (num_sequences,), generator=rng).double()
    turn_rewards = 0.1 * torch.randn(num_turns, generator=rng, dtype=torch.float64)
    session_of_turn = torch.repeat_interleave(turns_per_session)
    from_turns = torch.zeros(num_sequences, dtype=torch.float64)
    is_branch = torch.arange(num_sequences) % 8 >= 2  # two trunks a group, three branches each
    trunk = torch.arange(num_sequences) // 8 * 8 + torch.arange(num_sequences) % 2
    reach = torch.rand(num_sequences, generator=rng) * turns_per_session[trunk]
    return CreditBatch(
        group=torch.arange(num_sequences) // 8,
        turns_per_session=turns_per_session,
        tokens_per_turn=tokens_per_turn,
        outcome_rewards=outcome,
        turn_rewards=turn_rewards,
        truncated=torch.rand(num_sequences, generator=rng) < 0.1,
        named_rewards={
            "outcome": outcome,
            "turn": from_turns.index_add(0, session_of_turn, turn_rewards),
        },
        values=normal,
        bootstrap_values=torch.randn(num_sequences, generator=rng),
        old_logprobs=-normal.abs(),
        sum_pi_squared=torch.rand(num_tokens, generator=rng),
        greedy_rewards=torch.rand(num_sequences, generator=rng, dtype=torch.float64),
        anchors=torch.randint(-1, 20, (num_turns,), generator=rng),
        parent=torch.where(is_branch, trunk, -1),
        branch_turn=torch.where(is_branch, reach.long(), 0),
    )


@dataclass(slots=True, frozen=True)
class Stopwatch:
    """Median time of a call."""

    clock: Callable[[], float]

    def median_ms(self, call: Callable[[], Any], repeats: int) -> float:
        """Call ``repeats`` times; milliseconds."""
        times = []
        for _ in range(repeats):
            start = self.clock()
            call()
            times.append(self.clock() - start)
        return 1e3 * statistics.median(times)


def copies(batch: CreditBatch, needs: frozenset[str], credit: Credit) -> Callable[[], Any]:
    """Copy what is read and what is written, once."""
    read = [getattr(batch, field) for need in needs for field in TOKEN_FIELDS.get(need, ())]
    written = [t for t in (credit.advantages, credit.value_targets) if t is not None]
    pairs = [(tensor, torch.empty_like(tensor)) for tensor in (*read, *written)]
    return lambda: [target.copy_(source) for source, target in pairs]


def verl_calls(batch: CreditBatch) -> dict[str, Callable[[], Any]]:
    """Name -> verl's function on the padded batch; empty where verl is not installed."""
    try:
        from verl.trainer.config import AlgoConfig  # pyright: ignore[reportMissingImports]
        from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    lengths = batch.tokens_per_session
    num, width = len(lengths), int(lengths.max())
    row = batch.session_of_token
    column = torch.arange(len(row)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)

    def padded(values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(num, width)
        out[row, column] = values.float()
        return out

    rewards = torch.zeros(num, width)
    rewards[torch.arange(num), lengths - 1] = batch.returns.float()
    mask = padded(torch.ones(len(row)))
    index = np.array([str(g) for g in batch.group.tolist()], dtype=object)
    config = AlgoConfig(gamma=1.0)
    assert batch.greedy_rewards is not None
    assert batch.values is not None and batch.old_logprobs is not None
    assert batch.sum_pi_squared is not None
    given = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": index,
        "config": config,
        "values": padded(batch.values),
        "gamma": 1.0,
        "lam": 1.0,
        "reward_baselines": batch.greedy_rewards.float(),
        "old_log_probs": padded(batch.old_logprobs),
        "sum_pi_squared": padded(batch.sum_pi_squared),
    }
    calls: dict[str, Callable[[], Any]] = {}
    for name in ESTIMATORS.names():
        try:
            function = core_algos.get_adv_estimator_fn(name)
        except ValueError:
            continue
        wanted = inspect.signature(function).parameters
        arguments = {key: value for key, value in given.items() if key in wanted}
        calls[name] = lambda f=function, a=arguments: f(
            **{k: v.clone() if k == "token_level_rewards" else v for k, v in a.items()}
        )
    return calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--verl-repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wall", action="store_true", help="wall-clock time, not CPU time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(options.tokens, options.sequences, options.seed)
    theirs = verl_calls(batch)
    watch = Stopwatch(time.perf_counter if options.wall else time.thread_time)
    rows: dict[str, dict[str, float | None]] = {}
    for name in ESTIMATORS.names():
        function = get_estimator(name)
        credit = function(batch)
        rows[name] = {
            "ours_ms": watch.median_ms(lambda f=function: f(replace(batch)), options.repeats),
            "verl_ms": watch.median_ms(theirs[name], options.verl_repeats)
            if name in theirs
            else None,
            "limit_ms": watch.median_ms(copies(batch, function.needs, credit), options.repeats),
        }
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{options.tokens} tokens, {options.sequences} sequences, 1 thread")
    print(f"{'estimator':<30} {'ours':>9} {'verl':>9} {'limit':>9}   ms")
    for name, row in rows.items():
        cells = ["-" if value is None else f"{value:.1f}" for value in row.values()]
        print(f"{name:<30} " + " ".join(f"{cell:>9}" for cell in cells))


if __name__ == "__main__":
    main()
