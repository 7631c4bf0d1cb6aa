from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.credit import CreditBatch
from agentrl.algo.group_baselines import rloo
from agentrl.algo.tree import tree
from agentrl.testing.credit import SessionCredit, make_credit


def leaf(
    outcome: float, turns: int = 1, *, parent: int = -1, at: int = 0, group: int = 0, **more
) -> SessionCredit:
    return SessionCredit(
        group=group, tokens=[1] * turns, outcome=outcome, parent=parent, branch_turn=at, **more
    )


def test_trees_without_branches_get_the_advantages_of_rloo() -> None:
    batch = make_credit(leaf(1.0, 2), leaf(0.0), leaf(0.5), leaf(3.0, group=1), leaf(1.0, group=1))
    assert torch.equal(tree(batch).advantages, rloo(batch).advantages)


def test_a_prefix_gets_the_mean_over_the_leaves_below_it() -> None:
    batch = make_credit(
        leaf(1.0, 2),  # trunk of two turns ...
        leaf(0.0, 1, parent=0, at=1),  # ... and a branch after its first
        leaf(0.25, 1),  # the other tree
    )
    # Inter-tree baseline of the first: 0.25. Of the second: the mean 0.5 of the first.
    # Behind the branch point each counts half, and is compared with the other one as well.
    first = 0.5 - 0.25
    trunk = 0.5 * (1.0 - (0.25 + 0.0) / 2)
    branch = 0.5 * (0.0 - (0.25 + 1.0) / 2)
    assert tree(batch).advantages.tolist() == pytest.approx([first, trunk, branch, -0.25])


def test_every_continuation_of_a_state_counts_the_same_whatever_branches_later() -> None:
    batch = make_credit(
        leaf(1.0, 3),
        leaf(0.0, 2, parent=0, at=1),
        leaf(0.5, 1, parent=0, at=2),
        leaf(0.0, 1),
    )
    got = tree(batch).advantages.tolist()
    # Behind the first point: trunk (1 + 0.5) / 2 = 0.75, branch 0: the prefix is worth 0.375.
    assert got[0] == pytest.approx(0.375)
    assert got[1] == pytest.approx(0.5 * (0.75 - (0.0 + 0.0) / 2))
    rest = (0.375 - 0.25 * 1.0) / 0.75
    assert got[2] == pytest.approx(0.25 * (1.0 - rest / 2))


def test_a_lone_tree_compares_its_branches_and_says_nothing_of_its_prefix() -> None:
    batch = make_credit(leaf(1.0, 2), leaf(0.0, 1, parent=0, at=1))
    assert tree(batch).advantages.tolist() == [0.0, 0.5, -0.5]


def test_a_branch_at_the_parents_own_start_is_a_branch_of_the_grandparent() -> None:
    flat = make_credit(
        leaf(1.0, 2), leaf(0.0, 1, parent=0, at=1), leaf(0.4, 1, parent=0, at=1), leaf(0.3)
    )
    nested = make_credit(
        leaf(1.0, 2), leaf(0.0, 1, parent=0, at=1), leaf(0.4, 1, parent=1, at=1), leaf(0.3)
    )
    assert torch.equal(tree(flat).advantages, tree(nested).advantages)


def test_a_branch_whose_parent_failed_is_a_tree_of_its_own() -> None:
    batch = make_credit(leaf(1.0, 2), leaf(0.0, 1, parent=-1, at=1))
    assert tree(batch).advantages.tolist() == [1.0, 1.0, -1.0]


def test_penalties_of_inherited_turns_count_in_a_branch() -> None:
    batch = make_credit(
        leaf(1.0, 2, penalties=[-0.5, 0.0]),
        leaf(1.0, 1, parent=0, at=1, penalties=[0.0]),
        leaf(0.0, 1, penalties=[0.0]),
    )
    # Both leaves earned 0.5 over their paths: nothing to choose between, only the other tree.
    assert tree(batch).advantages.tolist() == pytest.approx([0.5, 0.125, 0.125, -0.5])


@pytest.mark.parametrize(
    ("sessions", "what"),
    [
        ([leaf(1.0), leaf(0.0, parent=0, at=2)], "session 1 branches off session 0 at turn 2"),
        ([leaf(1.0, 2), leaf(0.0, parent=0, at=1, group=1)], "same group"),
        ([leaf(1.0, parent=1, at=1), leaf(0.0, parent=0, at=1)], "after itself"),
        ([leaf(1.0, parent=0, at=1)], "after itself"),
    ],
)
def test_what_is_no_tree_is_refused(sessions: list[SessionCredit], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        tree(make_credit(*sessions))


def test_a_batch_without_the_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="no parent"):
        tree(make_credit(SessionCredit()))


@st.composite
def forests(draw: st.DrawFn) -> list[SessionCredit]:
    """One or two groups of trunks, and branches off any earlier session, nested ones too."""
    made: list[SessionCredit] = []
    for number in range(draw(st.integers(1, 9))):
        turns, outcome = draw(st.integers(1, 3)), draw(st.floats(-2, 2, width=32))
        above = draw(st.integers(-1, number - 1))
        if above < 0:
            made.append(leaf(outcome, turns, group=draw(st.integers(0, 1))))
            continue
        parent = made[above]
        earliest = parent.branch_turn + (parent.parent != -1)
        at = draw(st.integers(earliest, parent.branch_turn + len(parent.tokens)))
        made.append(leaf(outcome, turns, parent=above, at=at, group=parent.group))
    return made


def naive(batch: CreditBatch) -> list[float]:
    """The formulas as recursion over nodes, one per turn."""
    parent, start = batch.require("parent").tolist(), batch.require("branch_turn").tolist()
    turns, returns = batch.turns_per_session.tolist(), batch.returns.tolist()
    groups = batch.group.tolist()

    def continuations(session: int, depth: int) -> list[tuple[int, int]]:
        """(session, depth) of what was gone on with from the state before turn ``depth``."""
        others = [(b, depth) for b, p in enumerate(parent) if p == session and start[b] == depth]
        return [(session, depth), *others]

    def below(session: int, depth: int) -> float:
        """Mean return of what follows from the session's turn ``depth``, that turn included."""
        if depth == start[session] + turns[session]:
            return returns[session]
        options = continuations(session, depth + 1)
        return sum(below(*option) for option in options) / len(options)

    def value(session: int) -> float:
        options = continuations(session, start[session])
        return sum(below(*option) for option in options) / len(options)

    def share(session: int, depth: int) -> float:
        """One over the number of continuations, over all branch points of the path."""
        product = 1.0
        while session >= 0:
            first = start[session] + (parent[session] >= 0)
            for d in range(first, depth + 1):
                product /= len(continuations(session, d))
            if parent[session] >= 0:
                product /= len(continuations(parent[session], start[session]))
            session, depth = parent[session], start[session] - 1
        return product

    def root(session: int) -> int:
        return session if parent[session] < 0 else root(parent[session])

    out = []
    for session in range(len(parent)):
        mine = [r for r, g in zip(returns, groups, strict=True) if g == groups[session]]
        rivals = [
            s
            for s in range(len(parent))
            if parent[s] < 0 and groups[s] == groups[session] and s != root(session)
        ]
        for depth in range(start[session], start[session] + turns[session]):
            w, q = share(session, depth), below(session, depth)
            baselines = [sum(map(value, rivals)) / len(rivals)] if rivals else []
            if w < 1:
                baselines.append((value(root(session)) - w * q) / (1 - w))
            silent = not baselines or max(mine) - min(mine) < 1e-5
            out.append(0.0 if silent else w * (q - sum(baselines) / len(baselines)))
    return out


@settings(deadline=None)
@given(forests())
def test_tree_equals_the_recursion_over_its_nodes(made: list[SessionCredit]) -> None:
    batch = make_credit(*made)
    assert tree(batch).advantages.tolist() == pytest.approx(naive(batch), abs=2e-5)
