"""The batch, and what holds for every registered estimator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.credit import ESTIMATORS, Credit, CreditBatch, estimator, get_estimator
from agentrl.errors import RegistryError
from agentrl.testing.credit import SessionCredit, make_credit

NAMES = ESTIMATORS.names()
GROUP_ESTIMATORS = [name for name in NAMES if get_estimator(name).min_group > 1]
DIFFERENT_LENGTHS_COUNT = {"turn_return", "discounted_outcome"}
"""A session that goes on where others stopped has a return-to-go where theirs is 0."""


@st.composite
def batches(draw: st.DrawFn) -> list[SessionCredit]:
    """Sessions with all that any estimator needs; trunks only."""
    number = st.integers(-8, 8).map(lambda quarters: quarters / 4)
    made = []
    for _ in range(draw(st.integers(1, 7))):
        tokens = draw(st.lists(st.integers(0, 3), max_size=3))
        total = sum(tokens)

        def numbers(count: int, kind: st.SearchStrategy[float] = number) -> list[float]:
            return draw(st.lists(kind, min_size=count, max_size=count))

        named = {"a": draw(number), "b": draw(number)}
        made.append(
            SessionCredit(
                group=draw(st.integers(0, 2)),
                tokens=tokens,
                turn_rewards=numbers(len(tokens)),
                outcome=draw(number),
                named=named,
                truncated=draw(st.booleans()),
                values=numbers(total),
                bootstrap=draw(number),
                old_logprobs=numbers(total, st.floats(-3, -0.0625, width=32)),
                sum_pi_squared=numbers(total, st.floats(0.5, 1, width=32)),
                greedy=draw(number),
                anchors=[draw(st.integers(-1, 2)) for _ in tokens],
                parent=-1,
            )
        )
    return made


def run(name: str, sessions: list[SessionCredit], **arguments: Any) -> list[torch.Tensor]:
    """Advantages per session."""
    batch = make_credit(*sessions)
    credit = get_estimator(name)(batch, **arguments)
    assert credit.advantages.shape == (batch.num_tokens,)
    assert bool(credit.advantages.isfinite().all())
    return list(credit.advantages.split(batch.tokens_per_session.tolist()))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(made=batches(), data=st.data())
def test_the_order_of_sessions_does_not_matter(
    name: str, made: list[SessionCredit], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(made))))
    straight, permuted = run(name, made), run(name, [made[i] for i in order])
    for position, session in enumerate(order):
        torch.testing.assert_close(permuted[position], straight[session], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@settings(deadline=None, max_examples=15)
@given(made=batches())
def test_a_group_of_one_gives_exactly_zero(name: str, made: list[SessionCredit]) -> None:
    alone = [replace(session, group=i) for i, session in enumerate(made)]
    assert not any(bool(part.any()) for part in run(name, alone))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@settings(deadline=None, max_examples=15)
@given(made=batches(), reward=st.sampled_from([0.0, 1.0, 0.1 + 0.2, -7.3, 1e6 / 3]))
def test_equal_rewards_give_exactly_zero(
    name: str, made: list[SessionCredit], reward: float
) -> None:
    if name in DIFFERENT_LENGTHS_COUNT:
        made = [replace(made[0], group=session.group) for session in made]
    jitter = [reward * (1 + 1e-12 * (-1) ** i) for i in range(len(made))]
    equal = [
        replace(
            session,
            outcome=r,
            turn_rewards=None,
            named={"a": r, "b": 0.0},
            anchors=[-1] * len(session.tokens),
        )
        for session, r in zip(made, jitter, strict=True)
    ]
    assert not any(bool(part.any()) for part in run(name, equal))


@pytest.mark.parametrize("name", [n for n in GROUP_ESTIMATORS if n not in {"gpg", "gigpo"}])
@settings(deadline=None, max_examples=15)
@given(made=batches(), shift=st.sampled_from([1.0, -3.5]))
def test_what_every_member_of_a_group_earned_in_addition_changes_nothing(
    name: str, made: list[SessionCredit], shift: float
) -> None:
    if name in DIFFERENT_LENGTHS_COUNT:  # the last turn has to be the same one
        made = [replace(made[0], group=s.group, outcome=s.outcome, named=s.named) for s in made]
    # A tail that one member alone reached has no baseline that could take the shift out.
    arguments = {"handle_zero_tail": False} if name.endswith("token_baseline") else {}
    more = [
        replace(s, outcome=s.outcome + shift, named={**s.named, "a": s.named["a"] + shift})
        for s in made
    ]
    pairs = zip(run(name, made, **arguments), run(name, more, **arguments), strict=True)
    for before, after in pairs:
        torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_tokens_or_without_sessions_gives_no_advantages(name: str) -> None:
    nothing: dict[str, Any] = {
        field: [] for field in ("values", "old_logprobs", "sum_pi_squared", "anchors")
    }
    silent = SessionCredit(
        tokens=[], outcome=1.0, named={"a": 1.0}, parent=-1, greedy=0.0, bootstrap=0.0, **nothing
    )
    for batch in (make_credit(silent), make_credit(silent, silent)):
        assert get_estimator(name)(batch).advantages.shape == (0,)
    empty = make_credit(silent).select(torch.tensor([False]))
    assert get_estimator(name)(empty).advantages.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_does_not_write_to_its_batch(name: str) -> None:
    session = SessionCredit(
        tokens=[2, 1],
        turn_rewards=[0.5, 0.25],
        outcome=1.0,
        named={"a": 1.75},
        penalties=[0.1, -0.2, 0.3],
        values=[0.5, 0.25, 0.75],
        old_logprobs=[-0.5, -1.0, -0.25],
        sum_pi_squared=[0.5, 0.5, 0.75],
        is_weights=[1.0, 2.0, 0.5],
        greedy=0.5,
        anchors=[0, 1],
        parent=-1,
    )
    batch = make_credit(session, replace(session, outcome=0.0, named={"a": 0.75}))
    fields = [name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)]
    before = {field: getattr(batch, field).clone() for field in fields}
    returns = batch.returns.clone()
    get_estimator(name)(batch)
    assert all(torch.equal(getattr(batch, field), before[field]) for field in fields)
    assert torch.equal(batch.returns, returns)


class TestBatch:
    batch = make_credit(
        SessionCredit(group=4, tokens=[2, 1], turn_rewards=[1.0, 2.0], anchors=[0, 1], parent=-1),
        SessionCredit(group=4, tokens=[], outcome=0.5, anchors=[], parent=-1),
        SessionCredit(group=9, tokens=[0, 3], named={}, anchors=[2, -1], parent=-1),
        SessionCredit(group=9, tokens=[1], anchors=[3], parent=2, branch_turn=1),
    )

    def test_indices_follow_sessions_turns_and_tokens(self) -> None:
        batch = self.batch
        assert (batch.num_sessions, batch.num_tokens) == (4, 7)
        assert batch.session_of_turn.tolist() == [0, 0, 2, 2, 3]
        assert batch.turn_of_token.tolist() == [0, 0, 1, 3, 3, 3, 4]
        assert batch.tokens_per_session.tolist() == [3, 0, 3, 1]
        assert batch.session_of_token.tolist() == [0, 0, 0, 2, 2, 2, 3]
        assert batch.returns.tolist() == [3.0, 0.5, 0.0, 0.0]

    def test_spreading_keeps_the_dtype(self) -> None:
        by_session = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        assert self.batch.spread_sessions(by_session).tolist() == [1, 1, 1, 3, 3, 3, 4]
        assert self.batch.spread_sessions(by_session).dtype == torch.float64
        by_turn = torch.arange(5)
        assert self.batch.spread_turns(by_turn).tolist() == [0, 0, 1, 3, 3, 3, 4]

    def test_selecting_keeps_every_field_in_step_and_renumbers_parents(self) -> None:
        part = self.batch.select(torch.tensor([False, True, True, True]))
        assert part.group.tolist() == [4, 9, 9]
        assert part.tokens_per_turn.tolist() == [0, 3, 1]
        assert part.anchors is not None and part.anchors.tolist() == [2, -1, 3]
        assert part.parent is not None and part.parent.tolist() == [-1, -1, 1]
        assert part.returns.tolist() == [0.5, 0.0, 0.0]  # not the returns kept with the whole

    def test_selecting_a_branch_without_its_parent_is_refused(self) -> None:
        with pytest.raises(ValueError, match="branched off"):
            self.batch.select(torch.tensor([True, True, False, True]))

    def test_a_missing_field_is_named(self) -> None:
        with pytest.raises(ValueError, match="no values"):
            self.batch.require("values")


class TestRegistry:
    def test_a_function_without_the_decorator_needs_nothing(self, tmp_path: Any) -> None:
        (tmp_path / "mine.py").write_text(
            "from agentrl.algo.credit import Credit\n"
            "def estimate(batch):\n    return Credit(batch.spread_sessions(batch.returns))\n"
        )
        found = get_estimator(f"{tmp_path}/mine.py:estimate")
        assert (found.needs, found.min_group, found.unbiased) == (frozenset(), 1, ())
        assert found(make_credit(SessionCredit(outcome=2.0))).advantages.tolist() == [2.0]

    def test_an_unknown_name_is_refused_with_close_ones(self) -> None:
        with pytest.raises(RegistryError, match="turn_return"):
            get_estimator("turn_returns")

    def test_an_unknown_need_is_refused(self) -> None:
        with pytest.raises(ValueError, match="unknown needs"):
            estimator(needs=("oracle",))

    def test_the_decorator_marks_what_is_declared(self) -> None:
        @estimator(needs=("values",), min_group=2, unbiased=({},))
        def mine(batch: CreditBatch) -> Credit:
            return Credit(batch.require("values"))

        marked: Any = mine
        assert (marked.needs, marked.min_group, marked.unbiased) == ({"values"}, 2, ({},))
