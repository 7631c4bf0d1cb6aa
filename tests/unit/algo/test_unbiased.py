"""Every estimator that claims to be unbiased, against the true gradient of small exact MDPs.

A policy of a few logistic decisions plays an MDP in which it decides itself when to stop. All
groups of episodes it can produce are enumerated with their probabilities; the expectation of
``sum over tokens of advantage * grad log pi``, per member, must be the gradient of the expected
return. Nothing is sampled, so the comparison is one of plain floats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from agentrl.algo.credit import ESTIMATORS, Credit, CreditBatch, get_estimator
from agentrl.algo.turns import discounted_outcome, turn_return
from agentrl.testing.credit import SessionCredit, make_credit

TOLERANCE = 1e-10


@dataclass(frozen=True)
class State:
    """A decision of one sampled token: action 1 with probability ``sigmoid(theta[parameter])``."""

    parameter: int
    options: tuple[Option, Option]


@dataclass(frozen=True)
class Option:
    """What follows an action."""

    next: str | None
    reward: float = 0.0
    ends_turn: bool = True
    outcome: float = 0.0


@dataclass(frozen=True)
class Step:
    state: str
    parameter: int
    action: int
    probability: float
    option: Option


Episode = tuple[Step, ...]


@dataclass(frozen=True)
class MDP:
    states: dict[str, State]
    theta: tuple[float, ...]
    members: int

    def choose(self, name: str) -> Iterator[Step]:
        state = self.states[name]
        for action, option in enumerate(state.options):
            sign = 1 if action else -1
            probability = 1 / (1 + math.exp(-sign * self.theta[state.parameter]))
            yield Step(name, state.parameter, action, probability, option)

    def episodes(self, name: str | None = "start") -> Iterator[Episode]:
        if name is None:
            yield ()
            return
        for step in self.choose(name):
            for rest in self.episodes(step.option.next):
                yield (step, *rest)

    def gradient_of_log(self, step: Step) -> torch.Tensor:
        out = torch.zeros(len(self.theta), dtype=torch.float64)
        chosen_one = step.probability if step.action else 1 - step.probability
        out[step.parameter] = step.action - chosen_one
        return out

    def true_gradient(self, discount: float = 1.0) -> torch.Tensor:
        """With a discount: of the return times ``discount**(turns left)``, held fixed per turn."""
        total = torch.zeros(len(self.theta), dtype=torch.float64)
        for episode in self.episodes():
            turn_of, num_turns = turns_of(episode)
            for step, turn in zip(episode, turn_of, strict=True):
                weight = probability(episode) * earned(episode)
                total += weight * discount ** (num_turns - 1 - turn) * self.gradient_of_log(step)
        return total

    def greedy_return(self) -> float:
        return next(earned(e) for e in self.episodes() if all(s.probability > 0.5 for s in e))


def probability(episode: Episode) -> float:
    return math.prod(step.probability for step in episode)


def earned(episode: Episode) -> float:
    return sum(step.option.reward + step.option.outcome for step in episode)


def turns_of(episode: Episode) -> tuple[list[int], int]:
    """Turn index of every step, and the number of turns."""
    index, turn = [], 0
    for step in episode:
        index.append(turn)
        turn += step.option.ends_turn
    return index, turn


TWO_TURNS = MDP(
    # Stop for 0.2, or go on for 0.5 and then choose between 1 and 0.
    states={
        "start": State(0, (Option(None, 0.2), Option("again", 0.5))),
        "again": State(1, (Option(None, 0.0), Option(None, 1.0))),
    },
    theta=(0.3, -0.4),
    members=3,
)
THREE_TURNS = MDP(
    # Turns of one and two tokens, rewards of turns and of the outcome, and two ways into a state.
    states={
        "start": State(0, (Option("plain", ends_turn=False), Option("sly", ends_turn=False))),
        "plain": State(1, (Option(None, -0.3, outcome=0.4), Option("middle", 0.7))),
        "sly": State(2, (Option("middle", 0.1), Option(None, 0.0, outcome=1.5))),
        "middle": State(3, (Option(None, 0.25, outcome=-1.0), Option("late", 0.6))),
        "late": State(4, (Option("last", ends_turn=False), Option(None, 2.0))),
        "last": State(1, (Option(None, 0.0, outcome=3.0), Option(None, -0.5, outcome=0.2))),
    },
    theta=(0.2, -0.7, 0.5, 0.9, -0.1),
    members=2,
)
MDPS = {"two_turns": TWO_TURNS, "three_turns": THREE_TURNS}


def as_session(mdp: MDP, episode: Episode, group: int = 0) -> SessionCredit:
    """What the trainer would know of an episode; the critic is wrong in every state."""
    turn_of, num_turns = turns_of(episode)
    rewards = [0.0] * num_turns
    for step, turn in zip(episode, turn_of, strict=True):
        rewards[turn] += step.option.reward
    names = list(mdp.states)
    firsts = [turn_of.index(turn) for turn in range(num_turns)]
    return SessionCredit(
        group=group,
        tokens=[turn_of.count(turn) for turn in range(num_turns)],
        turn_rewards=rewards,
        outcome=sum(step.option.outcome for step in episode),
        values=[math.sin(3.0 * names.index(step.state) + 1) for step in episode],
        old_logprobs=[math.log(step.probability) for step in episode],
        sum_pi_squared=[step.probability**2 + (1 - step.probability) ** 2 for step in episode],
        greedy=mdp.greedy_return(),
        anchors=[names.index(episode[first].state) for first in firsts],
        parent=-1,
    )


def expected_gradient(mdp: MDP, estimate: Callable[[CreditBatch], Credit]) -> torch.Tensor:
    """Expectation over all groups, per member."""
    total = torch.zeros(len(mdp.theta), dtype=torch.float64)
    for group in itertools.product(list(mdp.episodes()), repeat=mdp.members):
        advantages = estimate(make_credit(*(as_session(mdp, e) for e in group))).advantages
        steps = [step for episode in group for step in episode]
        chance = math.prod(probability(episode) for episode in group)
        for advantage, step in zip(advantages.tolist(), steps, strict=True):
            total += chance * advantage * mdp.gradient_of_log(step) / mdp.members
    return total


CLAIMS = [(name, claim) for name in ESTIMATORS.names() for claim in get_estimator(name).unbiased]


@pytest.mark.parametrize("mdp", MDPS.values(), ids=MDPS)
@pytest.mark.parametrize(("name", "claim"), CLAIMS, ids=str)
def test_the_expected_gradient_is_the_true_one_where_it_is_claimed(
    name: str, claim: dict[str, Any], mdp: MDP
) -> None:
    found = expected_gradient(mdp, lambda batch: get_estimator(name)(batch, **claim))
    torch.testing.assert_close(found, mdp.true_gradient(), atol=TOLERANCE, rtol=0)


def test_the_claims_cover_every_family() -> None:
    assert {"rloo", "remax", "gae", "turn_gae", "bilevel_gae", "turn_return", "tree"} <= {
        name for name, _ in CLAIMS
    }


def test_the_true_gradient_of_the_two_turn_problem_by_hand() -> None:
    go, a = 1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(0.4))
    by_hand = [go * (1 - go) * (0.5 + a - 0.2), go * a * (1 - a)]
    assert TWO_TURNS.true_gradient().tolist() == pytest.approx(by_hand, abs=1e-14)
    assert by_hand == pytest.approx([0.17144, 0.13802], abs=5e-6)
    assert len(list(itertools.product(TWO_TURNS.episodes(), repeat=3))) == 27


def per_turn_index_baseline(batch: CreditBatch) -> Credit:
    """The witness: rewards of own turns, each less the others' mean reward at that turn index."""
    starts = batch.turns_per_session.cumsum(0) - batch.turns_per_session
    own = [
        batch.turn_rewards[s : s + n].tolist()
        for s, n in zip(starts.tolist(), batch.turns_per_session.tolist(), strict=True)
    ]
    for rewards, outcome in zip(own, batch.outcome_rewards.tolist(), strict=True):
        rewards[-1] += outcome
    advantages = []
    for i, rewards in enumerate(own):
        centred = []
        for k, reward in enumerate(rewards):
            others = [o[k] for j, o in enumerate(own) if j != i and len(o) > k]
            centred.append(reward - (sum(others) / len(others) if others else 0.0))
        advantages += [sum(centred[k:]) for k in range(len(rewards))]
    return Credit(batch.spread_turns(torch.tensor(advantages, dtype=torch.float64)))


@pytest.mark.parametrize("mdp", MDPS.values(), ids=MDPS)
def test_a_baseline_per_turn_index_over_own_turns_is_biased(mdp: MDP) -> None:
    error = expected_gradient(mdp, per_turn_index_baseline) - mdp.true_gradient()
    assert float(error.abs().max()) > 0.05


def test_the_bias_of_the_witness_taxes_the_decision_to_go_on() -> None:
    found = expected_gradient(TWO_TURNS, per_turn_index_baseline)
    assert found.tolist() == pytest.approx([0.09110, 0.13802], abs=5e-6)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("grpo", {"normalize_std": False}),
        ("opo", {}),
        ("optimal_token_baseline", {}),
        ("gigpo", {"normalize_std": False, "gamma": 1.0}),
        ("turn_return", {"normalize_std": True}),
        ("turn_return", {"gamma": 0.9}),
    ],
)
def test_estimators_without_the_claim_would_fail_it(name: str, arguments: dict[str, Any]) -> None:
    found = expected_gradient(THREE_TURNS, lambda b: get_estimator(name)(b, **arguments))
    assert float((found - THREE_TURNS.true_gradient()).abs().max()) > 1e-3


@pytest.mark.parametrize("pad_stopped", [True, False])
def test_with_a_discount_the_baseline_of_the_discounted_outcome_still_adds_nothing(
    pad_stopped: bool,
) -> None:
    found = expected_gradient(
        THREE_TURNS, lambda b: discounted_outcome(b, gamma=0.5, pad_stopped=pad_stopped)
    )
    wanted = THREE_TURNS.true_gradient(discount=0.5)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def test_a_turn_level_critic_read_at_the_first_token_would_bias_the_tokens_of_a_turn() -> None:
    """Why bilevel_gae reads the critic at the last token of a turn."""

    def read_at_the_first(batch: CreditBatch) -> Credit:
        """Bilevel GAE with everything at 1: the baseline is V(t) + V(first) - V(last)."""
        session = batch.session_of_turn
        to_go = turn_return(batch).advantages  # any valid advantage of the whole turn
        values = batch.require("values").double()
        ends = batch.tokens_per_turn.cumsum(0)
        first, last = ends - batch.tokens_per_turn, ends - 1
        assert len(session) == len(ends)
        correction = batch.spread_turns(values[first] - values[last])
        return Credit(to_go - values - correction)

    error = expected_gradient(THREE_TURNS, read_at_the_first) - THREE_TURNS.true_gradient()
    assert float(error.abs().max()) > 0.01


def exact_values(mdp: MDP) -> dict[str, float]:
    """What a perfect critic says of every state: the expected return from there on."""
    return {
        name: sum(probability(episode) * earned(episode) for episode in mdp.episodes(name))
        for name in mdp.states
    }


def with_perfect_critic(mdp: MDP, episode: Episode, *, turns: int | None = None) -> SessionCredit:
    """The session of an episode, cut short after so many ``turns``, with exact values."""
    values, turn_of = exact_values(mdp), turns_of(episode)[0]
    kept = tuple(
        step for step, turn in zip(episode, turn_of, strict=True) if turns is None or turn < turns
    )
    next_state = kept[-1].option.next
    return replace(
        as_session(mdp, kept),
        values=[values[step.state] for step in kept],
        truncated=next_state is not None,
        bootstrap=0.0 if next_state is None else values[next_state],
    )


READ_VALUES = [
    ("gae", {"lam": 0.3}),
    ("turn_gae", {"gamma": 1.0, "lam": 0.3}),
    ("bilevel_gae", {"gamma": 1.0, "token_lam": 0.3}),
]


def expected_with_critic(
    mdp: MDP, name: str, arguments: dict[str, Any], turns: int | None = None
) -> tuple[torch.Tensor, float]:
    """Expected gradient of one episode, and the expected square of its advantages."""
    total, square = torch.zeros(len(mdp.theta), dtype=torch.float64), 0.0
    for episode in mdp.episodes():
        session = with_perfect_critic(mdp, episode, turns=turns)
        found = get_estimator(name)(make_credit(session), whiten=False, **arguments).advantages
        square += probability(episode) * float(found.square().sum())
        for advantage, step in zip(found.tolist(), episode, strict=False):
            total += probability(episode) * advantage * mdp.gradient_of_log(step)
    return total, square


@pytest.mark.parametrize("mdp", MDPS.values(), ids=MDPS)
@pytest.mark.parametrize(("name", "arguments"), READ_VALUES)
def test_with_a_perfect_critic_lambda_costs_no_bias(
    name: str, arguments: dict[str, Any], mdp: MDP
) -> None:
    found, _ = expected_with_critic(mdp, name, arguments)
    # Values come in float32.
    torch.testing.assert_close(found, mdp.true_gradient(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "arguments"), READ_VALUES)
def test_with_a_perfect_critic_lambda_saves_variance(name: str, arguments: dict[str, Any]) -> None:
    whole = dict.fromkeys(arguments, 1.0)
    squares = [expected_with_critic(THREE_TURNS, name, a)[1] for a in (arguments, whole)]
    assert squares[0] < 0.95 * squares[1]


def test_a_lambda_over_turns_biases_bilevel_gae_even_with_a_perfect_critic() -> None:
    """Which token of a turn is the last one, where the critic is read, the token itself decides."""
    arguments = {"gamma": 1.0, "lam": 0.3}
    found, _ = expected_with_critic(THREE_TURNS, "bilevel_gae", arguments)
    assert float((found - THREE_TURNS.true_gradient()).abs().max()) > 1e-3


@pytest.mark.parametrize(("name", "arguments"), READ_VALUES)
def test_a_truncated_episode_credits_what_was_decided_before_the_cut(
    name: str, arguments: dict[str, Any]
) -> None:
    """Cut after the first turn, the value of the state it stopped in stands for the rest."""
    found, _ = expected_with_critic(TWO_TURNS, name, arguments, turns=1)
    assert found.tolist() == pytest.approx([float(TWO_TURNS.true_gradient()[0]), 0.0], abs=1e-6)


@pytest.mark.parametrize(("name", "arguments"), READ_VALUES)
def test_without_the_bootstrap_a_cut_would_tax_the_decision_to_go_on(
    name: str, arguments: dict[str, Any]
) -> None:
    """The witness: a session cut short that is taken for an end."""
    total = 0.0
    for episode in TWO_TURNS.episodes():
        session = replace(with_perfect_critic(TWO_TURNS, episode, turns=1), truncated=False)
        found = get_estimator(name)(make_credit(session), whiten=False, **arguments).advantages
        slope = TWO_TURNS.gradient_of_log(episode[0])
        total += probability(episode) * float(found[0] * slope[0])
    assert total < float(TWO_TURNS.true_gradient()[0]) - 0.05


# --- trees ---------------------------------------------------------------------------------------

TREE = MDP(
    # Stop or go on, twice; then a choice. Stopping late depends on the branches below.
    states={
        "start": State(0, (Option(None, 0.2), Option("middle", 0.5))),
        "middle": State(1, (Option(None, -0.4), Option("late", 0.3))),
        "late": State(2, (Option(None, outcome=-1.0), Option(None, 0.1, outcome=2.0))),
    },
    theta=(0.3, -0.4, 0.8),
    members=2,
)
CONTINUATIONS = {"start": 1, "middle": 2, "late": 2}
"""How often a state is gone on from, wherever it is reached: a rule that looks at nothing else."""


@dataclass(frozen=True)
class Tree:
    """A session and what branched off it: (turns before the branch, branch)."""

    chance: float
    steps: Episode
    branches: tuple[tuple[int, Tree], ...] = ()


def trees(name: str = "start", depth: int = 0) -> Iterator[Tree]:
    singles = list(go_on(name, depth))
    for first, *others in itertools.product(singles, repeat=CONTINUATIONS[name]):
        chance = math.prod(tree.chance for tree in (first, *others))
        yield Tree(chance, first.steps, first.branches + tuple((depth, tree) for tree in others))


def go_on(name: str, depth: int) -> Iterator[Tree]:
    for step in TREE.choose(name):
        if step.option.next is None:
            yield Tree(step.probability, (step,))
            continue
        for below in trees(step.option.next, depth + 1):
            yield Tree(step.probability * below.chance, (step, *below.steps), below.branches)


def lay_out(
    tree: Tree, group: int, sessions: list[SessionCredit], path: Episode = (), parent: int = -1
) -> Iterator[Step]:
    """Append the sessions of a tree, parents first; yields the steps of each."""
    whole = (*path, *tree.steps)
    position = len(sessions)
    session = as_session(TREE, tree.steps, group)
    inherited = earned(path)
    sessions.append(
        replace(session, parent=parent, branch_turn=len(path), outcome=session.outcome + inherited)
    )
    yield from tree.steps
    for depth, branch in tree.branches:
        yield from lay_out(branch, group, sessions, whole[:depth], position)


def expected_tree_gradient(estimate: Callable[[CreditBatch], Credit]) -> torch.Tensor:
    """Expectation over all pairs of trees, per tree; every pair is one group of one batch."""
    sessions: list[SessionCredit] = []
    weighted: list[tuple[float, Step]] = []
    for group, pair in enumerate(itertools.product(list(trees()), repeat=TREE.members)):
        chance = math.prod(tree.chance for tree in pair) / TREE.members
        for tree in pair:
            weighted += [(chance, step) for step in lay_out(tree, group, sessions)]
    advantages = estimate(make_credit(*sessions)).advantages
    total = [0.0] * len(TREE.theta)
    for (chance, step), advantage in zip(weighted, advantages.tolist(), strict=True):
        total[step.parameter] += chance * advantage * float(TREE.gradient_of_log(step).sum())
    return torch.tensor(total, dtype=torch.float64)


def test_all_trees_of_the_problem_have_probability_one() -> None:
    assert sum(tree.chance for tree in trees()) == pytest.approx(1.0, abs=1e-12)


def test_tree_is_unbiased_where_states_branch_by_a_rule_known_beforehand() -> None:
    found = expected_tree_gradient(get_estimator("tree"))
    torch.testing.assert_close(found, TREE.true_gradient(), atol=TOLERANCE, rtol=0)


def test_counting_all_leaves_alike_wherever_they_branched_off_is_biased() -> None:
    """The witness: every leaf's path is one episode of equal weight, as chains would be."""

    def over_leaves(batch: CreditBatch) -> Credit:
        parent, start = batch.require("parent").tolist(), batch.require("branch_turn").tolist()
        returns, groups = batch.returns.tolist(), batch.group.tolist()
        num_turns = batch.turns_per_session.tolist()
        first_turn = (batch.turns_per_session.cumsum(0) - batch.turns_per_session).tolist()
        root: list[int] = []
        leaves: dict[int, list[int]] = {}
        of_group: dict[int, list[int]] = {}
        for session, above in enumerate(parent):
            root.append(session if above < 0 else root[above])
            leaves.setdefault(root[-1], []).append(session)
            if above < 0:
                of_group.setdefault(groups[session], []).append(session)
        advantages = [0.0] * sum(num_turns)
        for trunk, members in leaves.items():
            (rival,) = (t for t in of_group[groups[trunk]] if t != trunk)
            others = [returns[leaf] for leaf in leaves[rival]]
            for leaf in members:
                share = (returns[leaf] - sum(others) / len(others)) / len(members)
                session, depth = leaf, start[leaf] + num_turns[leaf]
                while session >= 0:  # the turns of its path
                    for turn in range(start[session], depth):
                        advantages[first_turn[session] + turn - start[session]] += share
                    session, depth = parent[session], start[session]
        return Credit(batch.spread_turns(torch.tensor(advantages, dtype=torch.float64)))

    error = expected_tree_gradient(over_leaves) - TREE.true_gradient()
    assert float(error.abs().max()) > 1e-2
