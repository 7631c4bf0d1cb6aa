from __future__ import annotations

import pytest
import torch

from agentrl.algo.config import CreditConfig, GroupsConfig
from agentrl.testing.sessions import make_group, make_session
from agentrl.train.assemble import TrainBatch, assemble
from agentrl.train.credit import (
    credit_metrics,
    estimate,
    has_signal,
    needs_of,
    with_advantages,
)
from agentrl.types import TrajectoryGroup

PLAIN = CreditConfig(advantage_kwargs={"normalize_std": False})


def credited(*groups: TrajectoryGroup, choice: GroupsConfig | None = None) -> TrainBatch:
    made = assemble(groups, {"e": PLAIN})
    advantages = estimate(made.credit, ["e"] * len(made.sessions), {"e": PLAIN}).advantages
    return with_advantages(made, advantages, choice or GroupsConfig())


def test_advantages_stand_on_sampled_tokens_of_every_segment_and_nowhere_else() -> None:
    good = make_session("good", 1.0, [[0, 1, 1], [0, 0, 1]])
    bad = make_session("bad", 0.0, [[0, 1]])
    made = credited(make_group(good, bad))
    assert made.batch is not None
    assert made.batch.rows["session"].tolist() == [0, 0, 1]
    expected = [0, 0.5, 0.5, 0, 0, 0.5, 0, -0.5]
    assert made.batch.tokens["advantages"].tolist() == pytest.approx(expected)
    assert [a.tolist() for a in made.advantages["good"]] == [[0, 0.5, 0.5], [0, 0, 0.5]]
    assert made.trained_ids == {"good", "bad"}


def test_groups_without_a_difference_are_left_out_and_an_empty_step_says_why() -> None:
    flat = make_group(make_session("a", 1.0), make_session("b", 1.0))
    lost = make_group(make_session("c", None), index=1)
    made = credited(flat, lost)
    assert made.is_empty and made.num_tokens == 0
    assert "1 of 1 groups" in made.why_empty and "1 env_error" in made.why_empty
    assert [a.tolist() for a in made.advantages["a"]] == [[0, 0]]
    kept = credited(flat, choice=GroupsConfig(drop_zero_advantage=False))
    assert kept.batch is not None
    assert not kept.batch.tokens["advantages"].any()


def test_a_session_without_sampled_tokens_counts_in_the_baseline_but_does_not_train() -> None:
    silent = make_session("silent", 0.0, [[0, 0]])
    made = credited(make_group(silent, make_session("a", 1.0)))
    assert made.trained_ids == {"a"}
    assert [a.tolist() for a in made.advantages["silent"]] == [[0, 0]]
    assert [a.tolist() for a in made.advantages["a"]] == [[0, 0.5]]


def test_groups_of_highest_variance_are_kept_up_to_the_share_asked_for() -> None:
    pairs = [(1.0, 0.0), (0.5, 0.0), (0.25, 0.0)]  # variances 1/2, 1/8, 1/32: shares .76 .19 .05
    groups = [
        make_group(make_session(f"{i}a", a), make_session(f"{i}b", b), index=i)
        for i, (a, b) in enumerate(pairs)
    ]
    kept = {
        share: {name[0] for name in credited(*groups, choice=_top(share)).trained_ids}
        for share in (0.5, 0.8, 0.99, 1.0)
    }
    assert kept == {0.5: {"0"}, 0.8: {"0", "1"}, 0.99: {"0", "1", "2"}, 1.0: {"0", "1", "2"}}


def _top(share: float) -> GroupsConfig:
    return GroupsConfig(variance_top_p=share)


def test_every_environment_of_a_mix_has_its_own_estimator_and_sees_its_own_sessions() -> None:
    first = make_group(make_session("a", 1.0, env_id="e"), make_session("b", 0.0, env_id="e"))
    other = make_group(
        make_session("c", 1.0, env_id="f"), make_session("d", 0.0, env_id="f"), index=1
    )
    configs = {"e": PLAIN, "f": CreditConfig(advantage="rloo")}
    made = assemble([first, other, first], configs)
    envs = [session.env_id for session in made.sessions]
    advantages = estimate(made.credit, envs, configs).advantages
    assert advantages.tolist() == [0.5, -0.5, 1.0, -1.0, 0.5, -0.5]


def test_signal_is_what_the_estimator_makes_of_a_group() -> None:
    flat = make_group(make_session("a", 1.0), make_session("b", 1.0))
    mixed = make_group(make_session("a", 1.0), make_session("b", 0.0))
    assert not has_signal(flat, {"e": PLAIN})
    assert has_signal(mixed, {"e": PLAIN})
    assert not has_signal(make_group(make_session("a", None)), {"e": PLAIN})
    # Equal totals that were earned in other turns: nothing to a whole-episode estimator.
    early = make_session("a", 0.0, [[0, 1, 0, 1]], turn_rewards=(1.0, 0.0))
    late = make_session("b", 0.0, [[0, 1, 0, 1]], turn_rewards=(0.0, 1.0))
    assert not has_signal(make_group(early, late), {"e": PLAIN})
    assert has_signal(make_group(early, late), {"e": CreditConfig(advantage="turn_return")})


def test_needs_are_those_of_all_environments() -> None:
    configs = {"e": PLAIN, "f": CreditConfig(advantage="remax")}
    assert needs_of(configs) == {"greedy_rewards"}


def test_the_mass_of_advantages_is_told_by_turn() -> None:
    good = make_session("a", 1.0, [[0, 1, 1, 0, 1]])
    bad = make_session("b", 0.0, [[0, 1]])
    made = assemble([make_group(good, bad)], {"e": PLAIN})
    advantages = estimate(made.credit, ["e", "e"], {"e": PLAIN}).advantages
    metrics = credit_metrics(made, advantages)
    assert metrics["credit/advantage_mass/turn_1"] == pytest.approx(0.75)
    assert metrics["credit/advantage_mass/turn_2"] == pytest.approx(0.25)
    assert metrics["credit/reward/outcome"] == pytest.approx(0.5)


def test_groups_without_an_advantage_are_told_by_what_the_estimator_says() -> None:
    early = make_session("a", 0.0, [[0, 1, 0, 1]], turn_rewards=(1.0, 0.0))
    late = make_session("b", 0.0, [[0, 1, 0, 1]], turn_rewards=(0.0, 1.0))
    flat = make_group(make_session("c", 1.0), make_session("d", 1.0), index=1)
    fractions = []
    for config in (PLAIN, CreditConfig(advantage="turn_return")):
        made = assemble([make_group(early, late), flat], {"e": config})
        advantages = estimate(made.credit, ["e"] * 4, {"e": config}).advantages
        fractions.append(credit_metrics(made, advantages)["credit/zero_advantage_fraction"])
    assert fractions == [1.0, 0.5]  # equal totals, earned in other turns


def test_the_mass_of_a_branch_falls_on_the_turns_that_it_sampled() -> None:
    branch = make_session("b", 0.0, [[0, 1, 0, 1]], sample_index=1)
    first, second = branch.turns
    first.inherited, first.end = True, first.start
    branch.segments[0].loss_mask[1] = False
    branch.parent, branch.branch_turn = 0, 1
    assert second.index == 1
    made = assemble([make_group(make_session("a", 1.0), branch)], {"e": PLAIN})
    metrics = credit_metrics(made, torch.tensor([1.0, -3.0]))
    assert metrics["credit/advantage_mass/turn_1"] == pytest.approx(0.25)
    assert metrics["credit/advantage_mass/turn_2"] == pytest.approx(0.75)


def test_a_reward_that_falls_to_nothing_is_told_and_means_are_over_those_who_can_earn_it() -> None:
    configs = {
        "e": CreditConfig(reward_weights={"outcome": 1.0, "turn": 1.0}),
        "f": CreditConfig(reward_weights={"style": 2.0}),
    }
    mute = make_session("a", 0.0)
    styled = make_session("b", 1.0, parts={"style": 0.5}, env_id="f")
    made = assemble([make_group(mute), make_group(styled, index=1)], configs)
    metrics = credit_metrics(made, torch.zeros(2))
    assert metrics["credit/reward/outcome"] == metrics["credit/reward/turn"] == 0.0
    assert metrics["credit/reward/style"] == 1.0
    assert "credit/reward/tool" not in metrics  # nobody weighs it
