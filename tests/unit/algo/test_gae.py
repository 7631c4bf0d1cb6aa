from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.gae import bilevel_gae, gae, turn_gae
from agentrl.algo.ragged import whiten
from agentrl.testing.credit import SessionCredit, make_credit

RAW: dict[str, Any] = {"whiten": False}


@st.composite
def sessions(draw: st.DrawFn) -> list[SessionCredit]:
    """Sessions with turns of 0 to 4 tokens, rewards, penalties, and a critic."""
    number = st.floats(-2, 2, width=32)

    def numbers(count: int) -> list[float]:
        return draw(st.lists(number, min_size=count, max_size=count))

    made = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, 4), max_size=4))
        made.append(
            SessionCredit(
                tokens=tokens,
                turn_rewards=numbers(len(tokens)),
                outcome=draw(number),
                truncated=draw(st.booleans()),
                penalties=numbers(sum(tokens)),
                values=numbers(sum(tokens)),
                bootstrap=draw(number),
            )
        )
    return made


def turns_with_tokens(session: SessionCredit) -> tuple[list[list[int]], list[float]]:
    """Token indices of every turn that has some; what it paid, with the empty turns after it."""
    turns: list[list[int]] = []
    paid: list[float] = []
    token = 0
    rewards = list(session.turn_rewards or [])
    if rewards:
        rewards[-1] += session.outcome
    for count, reward in zip(session.tokens, rewards, strict=True):
        if count:
            turns.append(list(range(token, token + count)))
            paid.append(reward)
            token += count
        elif turns:
            paid[-1] += reward
    return turns, paid


def naive(session: SessionCredit, kind: str, gamma: float, lam: float) -> list[float]:
    """Advantages of one session, written as loops over its tokens or turns."""
    turns, paid = turns_with_tokens(session)
    values, penalties = list(session.values or []), list(session.penalties or [])
    after = (session.bootstrap or 0.0) if session.truncated else 0.0
    out = [0.0] * len(values)
    if kind == "token":
        rewards = penalties[:]
        for turn, reward in zip(turns, paid, strict=True):
            rewards[turn[-1]] += reward
        running, following = 0.0, after
        for t in reversed(range(len(values))):
            running = rewards[t] + gamma * following - values[t] + gamma * lam * running
            following = values[t]
            out[t] = running
    if kind == "turn":
        running, following = 0.0, after
        for turn, reward in reversed(list(zip(turns, paid, strict=True))):
            value = values[turn[0]]
            total = reward + sum(penalties[t] for t in turn)
            running = total + gamma * following - value + gamma * lam * running
            following = value
            for t in turn:
                out[t] = running
    if kind == "bilevel":
        running, following = 0.0, after
        coming: list[int] = []  # tokens of the next turn before its last one
        for turn, reward in reversed(list(zip(turns, paid, strict=True))):
            last = turn[-1]
            total = reward + penalties[last] + sum(penalties[t] for t in coming)
            running = total + gamma * following - values[last] + gamma * lam * running
            following, coming = values[last], turn[:-1]
            out[last] = inner = running
            for t in reversed(turn[:-1]):
                inner = penalties[t] + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * inner
                out[t] = inner
    return out


@settings(deadline=None)
@given(sessions(), st.sampled_from([(1.0, 1.0), (0.9, 0.7), (0.5, 0.0)]))
def test_all_three_equal_their_loops(
    made: list[SessionCredit], discounts: tuple[float, float]
) -> None:
    gamma, lam = discounts
    batch = make_credit(*made)
    kinds = {
        "token": gae(batch, gamma=gamma, lam=lam, whiten=False),
        "turn": turn_gae(batch, gamma=gamma, lam=lam, whiten=False),
        "bilevel": bilevel_gae(
            batch, gamma=gamma, lam=lam, token_gamma=0.9, token_lam=0.8, whiten=False
        ),
    }
    for kind, credit in kinds.items():
        wanted = [a for session in made for a in naive(session, kind, gamma, lam)]
        assert credit.advantages.tolist() == pytest.approx(wanted, abs=1e-6)


def test_gae_hand_worked() -> None:
    batch = make_credit(SessionCredit(tokens=[1, 1], outcome=1.0, values=[0.5, 0.25]))
    credit = gae(batch, gamma=1.0, lam=0.5, whiten=False)
    # delta: 0.25 - 0.5 = -0.25; 1 - 0.25 = 0.75. A: -0.25 + 0.5 * 0.75; 0.75.
    assert credit.advantages.tolist() == [0.125, 0.75]
    assert credit.value_targets is not None
    assert credit.value_targets.tolist() == [0.625, 1.0]
    assert credit.value_mask is None


def test_a_truncated_session_goes_on_with_the_critic_and_a_terminated_one_never() -> None:
    ended = SessionCredit(values=[0.5], bootstrap=10.0)
    cut = SessionCredit(values=[0.5], bootstrap=10.0, truncated=True)
    for estimate in (gae, turn_gae, bilevel_gae):
        credit = estimate(make_credit(ended, cut), gamma=0.5, lam=1.0, whiten=False)
        assert credit.advantages.tolist() == [-0.5, 4.5]


def test_a_truncated_session_without_a_bootstrap_value_is_refused() -> None:
    with pytest.raises(ValueError, match="bootstrap_values"):
        gae(make_credit(SessionCredit(values=[0.5], truncated=True)))


def test_without_a_critic_the_message_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no values"):
        gae(make_credit(SessionCredit()))


def test_whitening_scales_advantages_and_leaves_value_targets() -> None:
    batch = make_credit(
        SessionCredit(tokens=[2], outcome=1.0, values=[0.5, 0.0]), SessionCredit(values=[0.25])
    )
    for estimate in (gae, turn_gae, bilevel_gae):
        raw, scaled = estimate(batch, whiten=False), estimate(batch)
        assert torch.equal(scaled.advantages, whiten(raw.advantages))
        assert raw.value_targets is not None and scaled.value_targets is not None
        assert torch.equal(scaled.value_targets, raw.value_targets)


def test_turn_gae_reads_and_trains_the_critic_at_the_first_token_of_a_turn_only() -> None:
    noise = 99.0
    batch = make_credit(
        SessionCredit(
            tokens=[2, 0, 3],
            turn_rewards=[0.5, 0.25, 0.0],
            outcome=1.0,
            values=[0.1, noise, 0.2, noise, noise],
        )
    )
    credit = turn_gae(batch, gamma=1.0, lam=1.0, whiten=False)
    assert credit.advantages.tolist() == pytest.approx([1.65] * 2 + [0.8] * 3)
    assert credit.value_mask is not None and credit.value_targets is not None
    assert credit.value_mask.tolist() == [True, False, True, False, False]
    targets = credit.value_targets[credit.value_mask]
    assert targets.tolist() == pytest.approx([1.75, 1.0])


def test_bilevel_gae_starts_the_tokens_of_a_turn_from_its_advantage() -> None:
    batch = make_credit(
        SessionCredit(tokens=[2, 1], turn_rewards=[1.0, 0.0], outcome=2.0, values=[0.5, 0.25, 1.0])
    )
    credit = bilevel_gae(batch, gamma=0.5, lam=0.5, token_gamma=1.0, token_lam=0.5, whiten=False)
    last = 2.0 - 1.0
    first_turn = 1.0 + 0.5 * 1.0 - 0.25 + 0.25 * last
    first_token = 0.25 - 0.5 + 0.5 * first_turn
    assert credit.advantages.tolist() == pytest.approx([first_token, first_turn, last])


def test_bilevel_gae_with_all_discounts_at_one_is_gae() -> None:
    batch = make_credit(
        SessionCredit(
            tokens=[2, 3, 0],
            turn_rewards=[0.3, -0.2, 0.1],
            outcome=1.0,
            penalties=[0.1, -0.2, 0.3, 0.4, -0.1],
            values=[0.5, 0.25, 1.0, -1.0, 2.0],
        )
    )
    found = bilevel_gae(batch, gamma=1.0, lam=1.0, whiten=False).advantages
    torch.testing.assert_close(found, gae(batch, **RAW).advantages)


def test_a_perfect_critic_leaves_no_advantage() -> None:
    batch = make_credit(SessionCredit(tokens=[2, 1], outcome=1.0, values=[1.0, 1.0, 1.0]))
    for estimate in (gae, turn_gae, bilevel_gae):
        assert not estimate(batch, gamma=1.0).advantages.any()
