"""The idlest replica is the one that a look at all of them finds, whatever happened before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.serving.idle_order import IdleOrder
from agentrl.rollout.serving.supervisor import Replica, State


def idlest(replicas: list[Replica]) -> Replica | None:
    serving = [replica for replica in replicas if replica.state is State.SERVING]
    return min(serving, key=lambda replica: (replica.requests, replica.number), default=None)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["take", "give", "lose", "serve"])),
        max_size=400,
    )
)
def test_it_is_the_first_of_the_serving_replicas_by_requests_and_number(
    changes: list[tuple[int, str]],
) -> None:
    replicas = [Replica(number, state=State.SERVING) for number in range(5)]
    order = IdleOrder(replicas)
    for number, change in changes:
        replica = replicas[number]
        if change == "take" or (change == "give" and replica.requests):
            replica.requests += 1 if change == "take" else -1
            order.note(replica)
        elif change != "give":
            replica.state = State.LOST if change == "lose" else State.SERVING
            order.rebuild()
        assert order.idlest() is idlest(replicas)


def test_what_was_noted_long_ago_is_thrown_away() -> None:
    replicas = [Replica(number, state=State.SERVING) for number in range(3)]
    order = IdleOrder(replicas)
    for _ in range(10_000):
        replicas[0].requests += 1
        order.note(replicas[0])
    assert len(order._heap) <= 4 * 3 + 64
    assert order.idlest() is replicas[1]
