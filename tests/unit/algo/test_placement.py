from __future__ import annotations

from agentrl.algo.placement import paying_turns, token_payments, turn_payments
from agentrl.testing.credit import SessionCredit, make_credit


def test_a_reward_falls_on_the_last_token_of_its_turn_and_the_outcome_on_the_very_last() -> None:
    batch = make_credit(
        SessionCredit(tokens=[2, 3], turn_rewards=[0.5, 0.25], outcome=1.0),
        SessionCredit(tokens=[1], turn_rewards=[7.0], outcome=-2.0),
    )
    assert token_payments(batch).tolist() == [0, 0.5, 0, 0, 1.25, 5.0]
    assert turn_payments(batch).tolist() == [0.5, 1.25, 5.0]


def test_a_turn_without_tokens_pays_the_last_token_before_it() -> None:
    batch = make_credit(
        SessionCredit(tokens=[2, 0, 1, 0, 0], turn_rewards=[1, 10, 100, 1000, 1e4], outcome=1e5)
    )
    assert token_payments(batch).tolist() == [0, 11, 111100]
    assert paying_turns(batch).tolist() == [0, 0, 2, 2, 2]


def test_what_was_earned_before_the_first_token_falls_on_none_but_counts_in_the_return() -> None:
    batch = make_credit(
        SessionCredit(tokens=[1], turn_rewards=[3.0]),
        SessionCredit(tokens=[0, 1], turn_rewards=[5.0, 2.0]),
        SessionCredit(tokens=[0], turn_rewards=[4.0]),
        SessionCredit(tokens=[], outcome=9.0),
    )
    assert token_payments(batch).tolist() == [3.0, 2.0]
    assert paying_turns(batch).tolist() == [0, -1, 2, -1]
    assert batch.returns.tolist() == [3.0, 7.0, 4.0, 9.0]


def test_penalties_stay_on_their_tokens() -> None:
    batch = make_credit(
        SessionCredit(tokens=[1, 2], outcome=1.0, penalties=[-0.5, -0.25, -0.125]),
    )
    assert token_payments(batch).tolist() == [-0.5, -0.25, 0.875]
    assert turn_payments(batch).tolist() == [-0.5, 0.625]
    assert turn_payments(batch, penalties=False).tolist() == [0.0, 1.0]
    assert batch.returns.tolist() == [0.125]
