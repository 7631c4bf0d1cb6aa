"""Sessions stay where their prompt is cached, as long as that is worth it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.serving.routing import Load, Router
from agentrl.types import GenerateRequest, SamplingParams


def request(session: str, num_tokens: int = 10, *, salt: int = 0) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=[salt, *range(num_tokens - 1)],
        sampling=SamplingParams(max_tokens=1),
        session_id=session,
    )


def loads(*requests: int, room: int = 8) -> dict[int, Load]:
    return {number: Load(requests=count, room=room) for number, count in enumerate(requests)}


def router() -> Router:
    return Router(affinity_slack=2, affinity_tokens=100)


def test_a_new_session_goes_to_the_idlest_replica() -> None:
    assert router().choose(request("a"), loads(3, 1, 2)) == 1
    assert router().choose(request("a"), loads(1, 1, 1)) == 0


def test_a_session_stays_while_its_home_is_little_ahead_and_moves_beyond() -> None:
    found = router()
    assert found.choose(request("a"), loads(1, 0)) == 1
    assert found.choose(request("a"), loads(0, 2)) == 1
    assert found.choose(request("a"), loads(0, 3)) == 0
    assert found.choose(request("a"), loads(2, 0)) == 0  # it lives there now
    assert (found.num_kept, found.num_moved) == (2, 1)


def test_a_long_prompt_stays_longer() -> None:
    found = router()
    assert found.choose(request("short"), loads(1, 0)) == 1
    assert found.choose(request("long", salt=1), loads(1, 0)) == 1
    assert found.choose(request("short"), loads(0, 5)) == 0
    assert found.choose(request("long", 300), loads(0, 5)) == 1


def test_a_full_home_is_left() -> None:
    found = router()
    found.choose(request("a"), loads(0))
    full = {0: Load(requests=1, room=0), 1: Load(requests=1, room=1)}
    assert found.choose(request("a"), full) == 1
    assert found.choose(request("b"), {0: Load(requests=1, room=0)}) is None


def test_samples_of_one_prompt_meet() -> None:
    found = router()
    assert found.choose(request("group/0", salt=5), loads(1, 0)) == 1
    assert found.choose(request("group/1", salt=5), loads(0, 1)) == 1
    assert found.choose(request("other", salt=6), loads(0, 1)) == 0


def test_a_lost_replica_is_nobodys_home() -> None:
    found = router()
    found.choose(request("a"), loads(1, 0))
    found.forget_replica(1)
    assert found.home(request("a")) is None
    found.choose(request("a"), loads(1, 0))
    found.end_session("a")
    assert found.home_of("a") is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.lists(st.integers(0, 9), min_size=3, max_size=3),
            st.integers(1, 9),
        ),
        max_size=30,
    )
)
def test_the_rule_holds_for_any_loads(steps: list[tuple[int, list[int], int]]) -> None:
    found = router()
    for session, counts, num_tokens in steps:
        asked = request(f"s{session}", num_tokens * 50, salt=session)
        given_loads = {
            number: Load(requests=count, room=8 - count) for number, count in enumerate(counts)
        }
        home = found.home(asked)
        chosen = found.choose(asked, given_loads)
        free = {number: count for number, count in enumerate(counts) if count < 8}
        if not free:
            assert chosen is None
            continue
        assert chosen in free
        least = min(free.values())
        if home in free and free[home] - least <= 2 + len(asked.prompt_ids) / 100:
            assert chosen == home
        else:
            assert free[chosen] == least
