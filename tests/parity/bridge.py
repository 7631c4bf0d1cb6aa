"""One random ragged step, as verl's padded tensors and as ours.

Legend: ``B`` rows (sessions of one segment), ``T`` longest row, ``N`` tokens of all rows, ``M``
sampled ones, ``K`` turns. verl's tensors are [B, T] with a mask; at masked positions they hold
arbitrary numbers, which neither side may let through.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentrl.algo.credit import CreditBatch
from agentrl.batch import Batch

FIELDS = {
    "rollout_logprobs": (-1.2, 0.6),
    "old_offset": (0.0, 0.15),  # trainer's old policy over the engine's
    "new_offset": (0.0, 0.35),  # present policy over the old one: enough to be clipped
    "ref_offset": (0.0, 0.5),
    "values": (0.2, 0.7),
    "value_step": (0.0, 0.6),
    "advantages": (0.0, 1.0),
}
"""Name -> mean and deviation of what is drawn for every token."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Ragged:
    """A random step; tensors are verl's unless said otherwise."""

    mask: Tensor
    """bool [B, T]: sampled by the policy."""
    length: Tensor
    """int64 [B]: tokens of the row, observations included."""
    rewards: Tensor
    """float32 [B, T]: on the last sampled token of each turn, penalties on every sampled one."""
    fields: dict[str, Tensor]
    """Name -> float32 [B, T]."""
    credit: CreditBatch
    """Ours: the same step, sampled tokens only."""
    lone: Tensor
    """bool [B]: the only member of its group."""
    equal: Tensor
    """bool [B]: member of a group in which all earned exactly the same."""

    @property
    def index(self) -> np.ndarray:
        """verl's group labels: object [B]."""
        return np.array([f"g{int(label)}" for label in self.credit.group], dtype=object)

    @property
    def maskf(self) -> Tensor:
        """float32 [B, T]."""
        return self.mask.float()

    @property
    def empty(self) -> Tensor:
        """bool [B]: rows in which nothing was sampled."""
        return ~self.mask.any(dim=1)

    @property
    def inside(self) -> Tensor:
        """bool [B, T]: tokens of the row, padding left out."""
        return torch.arange(self.mask.shape[1]) < self.length[:, None]

    @property
    def session_of_token(self) -> Tensor:
        """int64 [N]."""
        return torch.repeat_interleave(self.length)

    def sampled(self, padded: Tensor) -> Tensor:
        """[B, T] -> [M], the order of ours."""
        return padded[self.mask]

    def flat(self, padded: Tensor) -> Tensor:
        """[B, T] -> [N]."""
        return padded[self.inside]

    def padded(self, sampled: Tensor) -> Tensor:
        """[M] -> [B, T], 0 where nothing was sampled."""
        return torch.zeros(self.mask.shape, dtype=sampled.dtype).masked_scatter(self.mask, sampled)

    def batch(self, **fields: Tensor) -> Batch:
        """Ours with token fields given as [B, T]."""
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), self.length.cumsum(0)])
        tokens = {name: self.flat(value) for name, value in fields.items()}
        tokens["ids"] = torch.zeros(int(self.length.sum()), dtype=torch.int64)
        tokens.setdefault("loss_mask", self.flat(self.mask))
        return Batch(cu_seqlens, tokens)

    def without_lone_rewards(self) -> Tensor:
        """``rewards`` with those of lone sessions taken away: float32 [B, T]."""
        return torch.where(self.lone[:, None], 0.0, self.rewards)


@functools.cache
def ragged(
    seed: int,
    *,
    lone: bool = True,
    empty: bool = True,
    penalties: bool = True,
    observed: bool = True,
) -> Ragged:
    """Draw a step of 2 to 6 groups; the same object for the same arguments.

    Args:
        seed: of everything that is drawn.
        lone: one group has a single member; otherwise all have two to four.
        empty: some rows have nothing sampled.
        penalties: sampled tokens have rewards of their own (as from a KL in the reward).
        observed: observations stand between sampled tokens; otherwise a row is sampled throughout.
    """
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 5, size=rng.integers(2, 6))]
    sizes += [1] if lone else []
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    plans = [
        _turns(rng, nothing=empty and i > 0 and rng.random() < 0.12, observed=observed)
        for i in range(len(labels))
    ]
    equal_group = 0
    group = torch.as_tensor(labels)
    layouts = [[flag for turn in plan for flag in turn] for plan in plans]
    width = max(len(row) for row in layouts)
    mask = torch.tensor([row + [False] * (width - len(row)) for row in layouts])
    length = torch.tensor([len(row) for row in layouts])
    rewards = torch.zeros(mask.shape)
    turn_rewards, tokens_per_turn, outcomes = [], [], []
    equal = group == equal_group
    for row, plan in enumerate(plans):
        # Multiples of 1/8 are exact in float32, so that "all equal" is exact on both sides.
        outcome = 0.5 if equal[row] else float(rng.integers(-8, 9)) / 8
        ends = np.cumsum([len(turn) for turn in plan])
        last = 0
        for turn, end in zip(plan, ends, strict=True):
            sampled_here = [i for i, flag in enumerate(turn) if flag]
            earned = 0.0 if equal[row] or not sampled_here else float(rng.integers(-4, 5)) / 8
            turn_rewards.append(earned)
            tokens_per_turn.append(len(sampled_here))
            if sampled_here:
                last = int(end) - len(turn) + sampled_here[-1]
                rewards[row, last] += earned
        rewards[row, last] += outcome  # of an empty row: on a masked token
        outcomes.append(outcome)
    penalty = torch.zeros(mask.shape)
    if penalties:
        drawn = torch.as_tensor(rng.normal(0, 0.05, mask.shape), dtype=torch.float32)
        penalty = torch.where(mask & ~equal[:, None], drawn, 0.0)
        rewards = rewards + penalty
    fields = _fields(rng, mask)
    credit = CreditBatch(
        group=group,
        turns_per_session=torch.tensor([len(plan) for plan in plans]),
        tokens_per_turn=torch.tensor(tokens_per_turn),
        outcome_rewards=torch.tensor(outcomes, dtype=torch.float64),
        turn_rewards=torch.tensor(turn_rewards, dtype=torch.float64),
        truncated=torch.zeros(len(plans), dtype=torch.bool),
        token_penalties=penalty[mask] if penalties else None,
        values=fields["values"][mask],
        bootstrap_values=torch.as_tensor(rng.normal(size=len(plans)), dtype=torch.float32),
        old_logprobs=fields["old_logprobs"][mask],
        sum_pi_squared=fields["sum_pi_squared"][mask],
        greedy_rewards=torch.as_tensor(rng.normal(size=len(sizes)))[group],
    )
    sizes_of = torch.bincount(group)[group]
    return Ragged(
        mask=mask,
        length=length,
        rewards=rewards,
        fields=fields,
        credit=credit,
        lone=sizes_of == 1,
        equal=equal,
    )


def _turns(rng: np.random.Generator, *, nothing: bool, observed: bool) -> list[list[bool]]:
    """Draw a session: per turn, flags of its tokens; observations stand before and after them."""
    turns = []
    for _ in range(rng.integers(1, 5)):
        sampled = 0 if nothing or rng.random() < 0.08 else int(rng.integers(1, 6))
        before, after = (int(n) for n in rng.integers(0, 3 if observed else 1, size=2))
        turns.append([False] * before + [True] * sampled + [False] * after)
    if nothing:
        turns[0] = [False]  # verl has no rows of no tokens
    elif not any(flag for turn in turns for flag in turn):
        turns[-1] = [True]
    return turns


def _fields(rng: np.random.Generator, mask: Tensor) -> dict[str, Tensor]:
    draw = {
        name: torch.as_tensor(rng.normal(mean, spread, mask.shape), dtype=torch.float32)
        for name, (mean, spread) in FIELDS.items()
    }
    rollout = draw["rollout_logprobs"].clamp(max=-0.01)
    old = (rollout + draw["old_offset"]).clamp(max=-0.005)
    new = (old + draw["new_offset"]).clamp(max=-0.001)
    pi = old.exp()
    rest = torch.as_tensor(rng.random(mask.shape), dtype=torch.float32)
    return {
        "rollout_logprobs": rollout,
        "old_logprobs": old,
        "logprobs": new,
        "ref_logprobs": old + draw["ref_offset"],
        "values": draw["values"],
        "new_values": draw["values"] + draw["value_step"],
        "advantages": draw["advantages"],
        "sum_pi_squared": pi.square() + (1 - pi).square() * rest,
    }


def truncated(step: Ragged, sessions: Tensor) -> Ragged:
    """The same step with some sessions, bool [B], ended by a limit."""
    return replace(step, credit=replace(step.credit, truncated=sessions))
