"""Advantage estimators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algo.credit import ESTIMATORS, Credit, CreditBatch, get_estimator
from tests.parity.bridge import Ragged, ragged
from tests.parity.record import SEEDS, compare
from tests.parity.verl_side import algo_config, core


def ours(step: Ragged, name: str, **settings: Any) -> Credit:
    return get_estimator(name)(step.credit, **settings)


def theirs(
    step: Ragged, name: str, *, rewards: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """verl's advantages and returns, [B, T], of ``rewards`` or the step's own."""
    return core.ADV_ESTIMATOR_REGISTRY[name](
        token_level_rewards=(step.rewards if rewards is None else rewards).clone(),
        response_mask=step.maskf,
        **settings,
    )


def of_rows(step: Ragged, rows: Tensor) -> Tensor:
    """Which sampled tokens are of the rows, bool [B]: bool [M]."""
    return step.sampled(rows[:, None].expand_as(step.mask))


def returns(step: Ragged) -> Tensor:
    """What every sampled token's row earned: [M]."""
    return step.sampled(step.rewards.sum(1, keepdim=True).expand_as(step.mask))


# --- with a critic -------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae(gamma: float, lam: float) -> None:
    """Where we differ: verl leaves whitened numbers on observations and padding.

    They are masked later, but whoever averages advantages first, as metrics do, averages them in.
    Ours exist for sampled tokens only.
    """
    for seed in SEEDS:
        step = ragged(seed)
        advantages, targets = theirs(
            step, "gae", values=step.fields["values"], gamma=gamma, lam=lam
        )
        got = ours(step, "gae", gamma=gamma, lam=lam)
        assert got.value_targets is not None
        compare(f"gae gamma={gamma} lam={lam}", got.advantages, step.sampled(advantages))
        compare(f"gae gamma={gamma} lam={lam}: returns", got.value_targets, step.sampled(targets))
        assert advantages[~step.mask].any(), "verl does not multiply by the mask"
        assert len(got.advantages) == int(step.mask.sum())


def test_gae_of_truncated_sessions() -> None:
    """Where we differ: verl takes an episode that ran into a limit for one that ended.

    Its value after the last token is 0 then, and the critic learns that long episodes are worth
    nothing. Ours is what the critic says of that state; verl agrees if it is paid as a reward.
    """
    gamma, lam = 0.98, 0.9
    for seed in SEEDS:
        step = ragged(seed)
        boot = step.credit.bootstrap_values
        assert boot is not None
        cut = torch.arange(len(step.mask)) % 2 == 0
        ended = step.mask.int().cumsum(1) == step.mask.sum(1, keepdim=True)
        last = step.mask & ended & cut[:, None]
        paid = step.rewards + torch.where(last, gamma * boot[:, None], 0.0)
        advantages, targets = theirs(
            step, "gae", rewards=paid, values=step.fields["values"], gamma=gamma, lam=lam
        )
        credit = replace(step.credit, truncated=cut)
        got = get_estimator("gae")(credit, gamma=gamma, lam=lam)
        assert got.value_targets is not None
        name = "gae, truncated (verl paid the bootstrap)"
        compare(name, got.advantages, step.sampled(advantages))
        compare(f"{name}: returns", got.value_targets, step.sampled(targets))


# --- one number per session ----------------------------------------------------------------------

OUTCOME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "grpo (vectorized)": ("grpo_vectorized", {}, {}),
    "dr_grpo": ("grpo", {"normalize_std": False}, {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", {}, {}),
    "opo": ("opo", {}, {}),
    "gpg": ("gpg", {}, {}),
}
"""Label -> verl's name, our settings, verl's settings. Each row of a group by itself."""
OUR_NAMES = {"grpo (vectorized)": "grpo", "dr_grpo": "grpo"}


@pytest.mark.parametrize("label", OUTCOME)
def test_outcome_estimators(label: str) -> None:
    """Where we differ: a group of one.

    verl takes 0 for its mean, so that the raw reward becomes the advantage: every lone session is
    pushed up by whatever it earned, compared with nothing. Ours is 0: a comparison within a group
    says nothing about a group of one (which is counted, and refused beforehand where all are).
    """
    name, settings, verls = OUTCOME[label]
    for seed in SEEDS:
        step = ragged(seed, penalties=seed % 2 == 0)
        advantages, _ = theirs(step, name, index=step.index, **verls)
        want, got = step.sampled(advantages), ours(step, OUR_NAMES.get(label, name), **settings)
        lone = of_rows(step, step.lone)
        compare(f"{label}, groups", got.advantages[~lone], want[~lone])
        assert not got.advantages[of_rows(step, step.equal)].any(), "exactly 0 in equal groups"
        if not bool(lone.any()):
            continue
        scale = 1.0
        if name == "gpg":
            earned = step.rewards.sum(1)
            scale = len(earned) / max(int(torch.count_nonzero(earned)), 1)
        compare(f"{label}, lone: verl's is the reward", scale * returns(step)[lone], want[lone])
        assert not got.advantages[lone].any()


def test_rloo_vectorized_agrees_on_lone_sessions_too() -> None:
    """verl's second form of RLOO gives them 0, as ours: its two forms differ from each other."""
    for seed in SEEDS:
        step = ragged(seed)
        advantages, _ = theirs(step, "rloo_vectorized", index=step.index)
        got = ours(step, "rloo").advantages
        compare("rloo (vectorized), all", got, step.sampled(advantages))


def test_equal_rewards_that_float32_cannot_hold() -> None:
    """Where we differ: three members that all earned 5.7 have a mean that is not quite 5.7.

    verl divides the rounding error by its own deviation plus 1e-6 and trains on the quotient, 0.3
    here, 0.8 for 100.1 in a group of 7. Ours takes differences below 1e-6 (relative) for none.
    """
    apart = 0
    for reward in (0.1, 0.3, 0.7, 1.1, 2.3, 5.7, 9.9, 100.1):
        for size in (3, 5, 6, 7):
            rewards = torch.zeros(size, 4)
            rewards[:, -1] = reward
            verls, _ = core.compute_grpo_outcome_advantage(
                rewards, torch.ones(size, 4), np.array(["g"] * size, dtype=object)
            )
            apart += float(verls.abs().max()) > 1e-3
            credit = CreditBatch(
                group=torch.zeros(size, dtype=torch.int64),
                turns_per_session=torch.ones(size, dtype=torch.int64),
                tokens_per_turn=torch.full((size,), 4),
                outcome_rewards=rewards[:, -1].double(),
                turn_rewards=torch.zeros(size, dtype=torch.float64),
                truncated=torch.zeros(size, dtype=torch.bool),
            )
            assert not get_estimator("grpo")(credit).advantages.any()
    assert apart > 8


def test_no_reward_at_all() -> None:
    """gpg divides by the number of rewards that are not 0; neither side divides by 0."""
    for seed in SEEDS:
        step = ragged(seed, penalties=False)
        nothing = replace(
            step.credit,
            outcome_rewards=torch.zeros_like(step.credit.outcome_rewards),
            turn_rewards=torch.zeros_like(step.credit.turn_rewards),
        )
        want, _ = theirs(step, "gpg", rewards=torch.zeros_like(step.rewards), index=step.index)
        got = get_estimator("gpg")(nothing).advantages
        compare("gpg, all rewards 0", got, step.sampled(want))


@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_passk(normalize: bool) -> None:
    for seed in SEEDS:
        step = ragged(seed, lone=False)
        config = algo_config(norm_adv_by_std_in_grpo=normalize)
        advantages, _ = theirs(step, "grpo_passk", index=step.index, config=config)
        got = ours(step, "grpo_passk", normalize_std=normalize).advantages
        name = "grpo_passk" if normalize else "grpo_passk without std"
        compare(name, got, step.sampled(advantages))


def test_grpo_passk_of_a_lone_session_is_no_error() -> None:
    """Where we differ: verl raises, and one failed episode beside it ends the run. Ours gives it 0
    and leaves the others as they are."""
    step = ragged(1)
    with pytest.raises(ValueError, match="at least 2 samples"):
        theirs(step, "grpo_passk", index=step.index, config=algo_config())
    got = ours(step, "grpo_passk").advantages
    assert not got[of_rows(step, step.lone)].any()
    assert got.any()


def test_opo_of_a_group_without_a_token() -> None:
    """Where we differ: verl's baseline is 0 / 0 there, and NaN times mask 0 is NaN in the batch."""
    mask = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 1.0], [0.5, 0.0]])
    verls, _ = core.compute_opo_outcome_advantage(
        rewards, mask, np.array(["a", "a", "b", "b"], dtype=object)
    )
    assert verls[:2].isnan().all()
    credit = CreditBatch(
        group=torch.tensor([0, 0, 1, 1]),
        turns_per_session=torch.tensor([1, 1, 1, 1]),
        tokens_per_turn=torch.tensor([0, 0, 2, 1]),
        outcome_rewards=torch.tensor([1.0, 0.5, 1.0, 0.5], dtype=torch.float64),
        turn_rewards=torch.zeros(4, dtype=torch.float64),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    got = get_estimator("opo")(credit).advantages
    assert torch.allclose(got.float(), verls[2:][mask[2:].bool()])


# --- scaled over the batch -----------------------------------------------------------------------


def test_reinforce_plus_plus_baseline() -> None:
    """Where we differ: a lone session's raw reward, which in verl also shifts and scales all
    others. Without its reward, verl agrees."""
    name = "reinforce_plus_plus_baseline"
    for seed in SEEDS:
        step = ragged(seed, lone=False)
        want, _ = theirs(step, name, index=step.index)
        compare(f"{name}, groups", ours(step, name).advantages, step.sampled(want))
        step = ragged(seed)
        got = ours(step, name).advantages
        want, _ = theirs(step, name, index=step.index, rewards=step.without_lone_rewards())
        compare(f"{name}, lone (verl: their reward taken away)", got, step.sampled(want))


def named(step: Ragged, seed: int) -> tuple[Ragged, dict[str, Any], dict[str, Any]]:
    """The step with two named rewards of different weight; verl's batch and non-tensor batch."""
    rng = np.random.default_rng(10_000 + seed)
    size = len(step.mask)
    weights = {"correct": 1.0, "format": 2.0}
    raw = {name: rng.integers(-4, 5, size=size) / 2 for name in weights}
    for values in raw.values():
        values[step.equal.numpy()] = 1.0
    credit = replace(
        step.credit,
        named_rewards={n: torch.as_tensor(w * raw[n]) for n, w in weights.items()},
        named_weights={n: torch.full((size,), w, dtype=torch.float64) for n, w in weights.items()},
    )
    # verl finds the end of a response by its attention mask, behind a prompt of one token.
    batch = {
        "prompts": torch.zeros(size, 1),
        "attention_mask": torch.cat([torch.ones(size, 1, dtype=torch.bool), step.inside], 1).long(),
    }
    return replace(step, credit=credit), batch, raw


def gdpo_of_verl(step: Ragged, batch: dict[str, Any], raw: dict[str, Any]) -> Tensor:
    config = {"gdpo_reward_keys": ["correct", "format"], "gdpo_reward_weights": [1.0, 2.0]}
    want, _ = theirs(
        step, "gdpo", index=step.index, config=config, non_tensor_batch=raw, batch=batch
    )
    return step.sampled(want)


def test_gdpo() -> None:
    """Where we differ: lone sessions, as above."""
    for seed in SEEDS:
        step, batch, raw = named(ragged(seed, lone=False, penalties=False), seed)
        compare("gdpo, groups", ours(step, "gdpo").advantages, gdpo_of_verl(step, batch, raw))
        step, batch, raw = named(ragged(seed, penalties=False), seed)
        got = ours(step, "gdpo").advantages
        without = {n: np.where(step.lone.numpy(), 0.0, values) for n, values in raw.items()}
        want = gdpo_of_verl(step, batch, without)
        compare("gdpo, lone (verl: their rewards taken away)", got, want)


# --- reward to go --------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma: float) -> None:
    for seed in SEEDS:
        step = ragged(seed)
        want, _ = theirs(step, "reinforce_plus_plus", config=algo_config(gamma=gamma))
        got = ours(step, "reinforce_plus_plus", gamma=gamma).advantages
        compare(f"reinforce_plus_plus gamma={gamma}", got, step.sampled(want))


def test_remax() -> None:
    for seed in SEEDS:
        step = ragged(seed)
        greedy = step.credit.greedy_rewards
        assert greedy is not None
        want, _ = theirs(step, "remax", reward_baselines=greedy.float())
        compare("remax", ours(step, "remax").advantages, step.sampled(want))


def living_companions(step: Ragged) -> Tensor:
    """Rows whose group has another row with a token: bool [B]."""
    alive = (~step.empty).long()
    return (
        torch.zeros(int(step.credit.group.max()) + 1, dtype=torch.int64).index_add(
            0, step.credit.group, alive
        )[step.credit.group]
        > 1
    )


def tails(step: Ragged) -> Tensor:
    """Sampled tokens that only the longest of a group reached: bool [M]."""
    position = step.mask.cumsum(1) - 1
    lengths = step.mask.sum(1)
    beyond = torch.zeros_like(step.mask)
    for row, group in enumerate(step.credit.group):
        others = (step.credit.group == group) & (torch.arange(len(step.mask)) != row)
        longest = int(lengths[others].max()) if bool(others.any()) else 0
        beyond[row] = position[row] >= longest
    return step.sampled(beyond)


def otb_of_verl(step: Ragged, name: str, *, weighted: bool, tail: bool) -> Tensor:
    """verl's, in float64: in float32 ``1 - 2 pi + sum pi^2`` has few digits left near pi = 1."""
    assert float(step.fields["old_logprobs"].max()) <= SURE
    want, _ = theirs(
        step,
        name,
        rewards=step.rewards.double(),
        index=step.index,
        old_log_probs=step.fields["old_logprobs"].double(),
        sum_pi_squared=step.fields["sum_pi_squared"].double(),
        rollout_is_weights=is_weights(step).double() if weighted else None,
        handle_zero_tail=tail,
    )
    return step.sampled(want)


def is_weights(step: Ragged) -> Tensor:
    log_ratio = step.fields["old_logprobs"] - step.fields["rollout_logprobs"]
    return log_ratio.exp().clamp(max=2.0)


SURE = -0.05
"""Log-probabilities above have so little energy that the epsilons decide: see the last tests."""


def unsure(step: Ragged) -> Ragged:
    """The step with no token that the policy was sure of."""
    old = step.fields["old_logprobs"].clamp(max=SURE)
    credit = replace(step.credit, old_logprobs=step.sampled(old))
    return replace(step, fields=step.fields | {"old_logprobs": old}, credit=credit)


@pytest.mark.parametrize("tail", [True, False], ids=["", "no tail"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline(name: str, weighted: bool, tail: bool) -> None:
    """verl's plain form on single turns, its multi-turn form on all; ours is one function.

    Where we differ: (1) a session that is alone, or whose companions have no token, gets its bare
    reward-to-go in verl; (2) so does the tail of the longest member of a group in which all earned
    the same. Both are raw rewards without a comparison: 0 in ours.
    """
    single = name == "optimal_token_baseline"
    label = f"{name}{' x is_weights' if weighted else ''}{'' if tail else ', tails too'}"
    for seed in SEEDS:
        step = unsure(ragged(seed, observed=not single))
        want = otb_of_verl(step, name, weighted=weighted, tail=tail)
        credit = step.credit
        if weighted:
            credit = replace(credit, is_weights=step.sampled(is_weights(step)))
        got = get_estimator(name)(credit, handle_zero_tail=tail).advantages
        compared = of_rows(step, living_companions(step))
        raw = tails(step) & of_rows(step, step.equal)  # (2)
        common = compared & ~raw if tail else compared
        compare(label, got[common], want[common])
        lone = of_rows(step, step.lone)
        assert not got[lone].any()
        if tail:
            assert not got[raw].any()


def test_where_verls_optimal_baseline_gives_the_bare_reward() -> None:
    name = "tir_optimal_token_baseline"
    seen = 0
    for seed in SEEDS:
        step = unsure(ragged(seed))
        want = otb_of_verl(step, name, weighted=False, tail=True)
        to_go = step.sampled((step.rewards * step.maskf).flip(1).cumsum(1).flip(1))
        lone = of_rows(step, step.lone) | (tails(step) & of_rows(step, step.equal))
        seen += int(lone.sum())
        compare("otb, lone and equal tails: verl's is the reward", to_go[lone], want[lone])
    assert seen > len(SEEDS)


def test_plain_optimal_token_baseline_with_observations() -> None:
    """Where we differ: verl's plain form compares members by their position in the padded row.

    With observations of different length in between, that compares the first token of one member
    with the fifth of another, and it takes the end of the second longest, counted in sampled
    tokens, for a position in the padded row. Ours counts sampled tokens, as verl's form for tools.
    """
    apart = 0
    for seed in SEEDS:
        step = unsure(ragged(seed))
        plain = otb_of_verl(step, "optimal_token_baseline", weighted=False, tail=False)
        packed = otb_of_verl(step, "tir_optimal_token_baseline", weighted=False, tail=False)
        apart += not torch.allclose(plain, packed, atol=1e-3)
    assert apart > len(SEEDS) // 2
    assert ESTIMATORS.get("optimal_token_baseline") is ESTIMATORS.get("tir_optimal_token_baseline")


def test_optimal_token_baseline_of_a_policy_sure_of_itself() -> None:
    """Where we differ: probability 1 has no gradient and no energy; verl's baseline is 0 / 1e-8 = 0
    and the advantage the raw reward. Ours falls back to the plain mean."""
    mask = torch.ones(2, 1)
    rewards = torch.tensor([[1.0], [3.0]])
    verls, _ = core.compute_multi_turn_optimal_token_baseline_advantage(
        rewards,
        mask,
        np.array(["g", "g"], dtype=object),
        old_log_probs=torch.zeros(2, 1),
        sum_pi_squared=torch.ones(2, 1),
    )
    assert verls.squeeze(1).tolist() == [1.0, 3.0]
    credit = CreditBatch(
        group=torch.tensor([0, 0]),
        turns_per_session=torch.tensor([1, 1]),
        tokens_per_turn=torch.tensor([1, 1]),
        outcome_rewards=torch.tensor([1.0, 3.0], dtype=torch.float64),
        turn_rewards=torch.zeros(2, dtype=torch.float64),
        truncated=torch.zeros(2, dtype=torch.bool),
        old_logprobs=torch.zeros(2),
        sum_pi_squared=torch.ones(2),
    )
    assert get_estimator("optimal_token_baseline")(credit).advantages.tolist() == [-1.0, 1.0]


def test_every_estimator_of_verl_is_here() -> None:
    forms = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
    named_there = {forms.get(name, name) for name in core.ADV_ESTIMATOR_REGISTRY}
    assert named_there <= set(ESTIMATORS.names())
