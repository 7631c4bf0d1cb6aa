from __future__ import annotations

import statistics

import pytest

from agentrl.algo.turns import discounted_outcome, gigpo, turn_return
from agentrl.testing.credit import SessionCredit, make_credit


def paid(*rewards: float, outcome: float = 0.0, **more) -> SessionCredit:
    return SessionCredit(tokens=[1] * len(rewards), turn_rewards=rewards, outcome=outcome, **more)


def test_turn_return_counts_members_that_stopped_as_zero() -> None:
    batch = make_credit(paid(0.2), paid(0.5, 1.0), paid(0.5, 0.0))
    # To go: 0.2; 1.5, 1; 0.5, 0. The first session counts as 0 at the second turn.
    wanted = [0.2 - 1.0, 1.5 - 0.35, 1.0 - 0.0, 0.5 - 0.85, 0.0 - 0.5]
    assert turn_return(batch).advantages.tolist() == pytest.approx(wanted)


def test_turn_return_can_leave_out_members_that_stopped() -> None:
    batch = make_credit(paid(0.2), paid(0.5, 1.0), paid(0.5, 0.0, outcome=2.0))
    wanted = [0.2 - 2.0, 1.5 - 1.35, 1.0 - 2.0, 2.5 - 0.85, 2.0 - 1.0]
    got = turn_return(batch, pad_stopped=False).advantages
    assert got.tolist() == pytest.approx(wanted)


def test_a_turn_that_no_other_member_reached_gets_the_advantage_of_the_whole_session() -> None:
    batch = make_credit(paid(0.5, 1.0, 4.0), paid(1.0))
    got = turn_return(batch, pad_stopped=False).advantages
    assert got.tolist() == pytest.approx([4.5, 4.5, 4.5, -4.5])
    same = make_credit(paid(0.0, 0.0, 0.1 + 0.2), paid(0.3))
    assert turn_return(same, pad_stopped=False).advantages.tolist() == [0.0] * 4


def test_turn_return_credits_the_turn_where_whole_returns_do_not_differ() -> None:
    batch = make_credit(paid(1.0, 0.0), paid(0.0, 1.0))
    for arguments in ({}, {"normalize_std": True}):
        got = turn_return(batch, **arguments).advantages.tolist()
        assert got[0] == 0 and got[1] < 0 and got[2] == 0 and got[3] > 0


def test_turn_return_discounts_and_puts_the_outcome_on_the_last_turn() -> None:
    batch = make_credit(paid(1.0, 0.0, outcome=4.0), paid(0.0, 0.0))
    got = turn_return(batch, gamma=0.5).advantages
    assert got.tolist() == [3.0, 4.0, -3.0, -4.0]


def test_normalising_divides_a_group_by_its_root_mean_square() -> None:
    batch = make_credit(paid(1.0), paid(0.0), paid(100.0, group=1), paid(0.0, group=1))
    got = turn_return(batch, normalize_std=True).advantages
    assert got.tolist() == pytest.approx([1, -1, 1, -1], abs=1e-5)


def test_an_empty_turn_keeps_its_index_and_its_reward() -> None:
    batch = make_credit(
        SessionCredit(tokens=[2, 0, 1], turn_rewards=[0.0, 1.0, 0.5]), paid(0.0, 0.0, 0.0)
    )
    assert turn_return(batch).advantages.tolist() == [1.5, 1.5, 0.5, -1.5, -1.5, -0.5]


def test_discounted_outcome_gives_late_turns_more_of_what_was_earned() -> None:
    batch = make_credit(paid(0.0, 0.0, 0.0, outcome=8.0), paid(0.0, 0.0, outcome=4.0))
    got = discounted_outcome(batch, gamma=0.5, pad_stopped=True).advantages
    assert got.tolist() == [2.0 - 2.0, 4.0 - 4.0, 8.0, 0.0, 0.0]
    reached = discounted_outcome(batch, gamma=0.5).advantages
    assert reached.tolist() == [0.0, 0.0, 8.0 - 4.0, 0.0, 0.0]


def test_discounted_outcome_without_discount_among_equal_lengths_is_rloo() -> None:
    batch = make_credit(paid(1.0, 0.5), paid(0.0, 0.25))
    assert discounted_outcome(batch, gamma=1.0).advantages.tolist() == [1.25] * 2 + [-1.25] * 2


def test_gigpo_adds_the_advantage_among_turns_that_start_from_the_same_state() -> None:
    batch = make_credit(
        paid(0.0, 1.0, anchors=[5, 6]),
        paid(0.0, 0.0, anchors=[5, 7]),
        paid(3.0, 0.0, group=1, anchors=[5, -1]),
        paid(2.0, 0.0, group=1, anchors=[9, -1]),
    )
    got = gigpo(batch, gamma=0.5, step_weight=2.0, normalize_std=False).advantages
    # Episodes: 0.5, -0.5, 0.5, -0.5. State 5 of the first group: 0.5 and 0 to go.
    assert got.tolist() == [0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5, 0.5, 0.5, -0.5, -0.5]
    scaled = gigpo(batch, gamma=0.5, step_weight=2.0).advantages.tolist()
    episode = 0.5 / statistics.stdev([1.0, 0.0])
    step = 0.25 / statistics.stdev([0.5, 0.0])
    assert scaled[:4] == pytest.approx(
        [episode + 2 * step, episode, -episode - 2 * step, -episode], abs=1e-4
    )


def test_gigpo_counts_every_session_once_in_its_statistics() -> None:
    long = paid(*[0.0] * 9, outcome=1.0, anchors=[-1] * 9)
    batch = make_credit(long, paid(0.0, anchors=[-1]))
    got = gigpo(batch, normalize_std=False).advantages
    assert got.tolist() == [0.5] * 9 + [-0.5]


def test_gigpo_compares_a_state_that_a_session_came_back_to() -> None:
    batch = make_credit(paid(0.0, 1.0, anchors=[1, 1]), paid(0.0, anchors=[2]))
    got = gigpo(batch, gamma=0.5, normalize_std=False).advantages
    assert got.tolist() == [0.5 - 0.25, 0.5 + 0.25, -0.5]
