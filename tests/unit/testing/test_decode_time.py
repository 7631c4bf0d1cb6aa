"""The roofline: figures of the formula, and closed forms against sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.testing.decode_time import H200, QWEN2_5_0_5B, QWEN3_1_7B, EngineCost, ModelShape
from agentrl.testing.tables import lognormal

SMALL = EngineCost(QWEN2_5_0_5B, H200)


@pytest.mark.parametrize(
    ("shape", "batch", "tokens_per_s"),
    [
        (QWEN2_5_0_5B, 1, 4300),
        (QWEN2_5_0_5B, 64, 153_000),
        (QWEN2_5_0_5B, 256, 262_000),
        (QWEN2_5_0_5B, 512, 296_000),
        (QWEN3_1_7B, 64, 25_100),
        (QWEN3_1_7B, 512, 34_600),
    ],
)
def test_decode_speed_is_that_of_the_published_table(
    shape: ModelShape, batch: int, tokens_per_s: float
) -> None:
    cost = EngineCost(shape, H200)
    assert batch / cost.step_s(batch, batch * 1000) == pytest.approx(tokens_per_s, rel=0.03)


def test_prefill_speed_is_that_of_the_published_table() -> None:
    assert 1000 / SMALL.prefill_s(1000) == pytest.approx(766_000, rel=0.01)
    assert 4000 / SMALL.prefill_s(4000) == pytest.approx(679_000, rel=0.01)


def test_prefill_in_two_parts_takes_the_time_of_one() -> None:
    parts = SMALL.prefill_s(300) + SMALL.prefill_s(700, 300)
    assert parts == pytest.approx(SMALL.prefill_s(1000))


COSTS = [
    SMALL,
    EngineCost(QWEN3_1_7B, H200, step_overhead_s=1e-4),
    # keys and values are nothing, so compute takes over as the context grows
    EngineCost(
        ModelShape(matmul_params=1e8, num_layers=24, num_heads=64, num_kv_heads=1, head_dim=1), H200
    ),
]


@given(
    cost=st.sampled_from(COSTS),
    steps=st.integers(0, 400),
    batch=st.integers(1, 600),
    context=st.integers(1, 10**6),
)
def test_the_time_of_many_steps_is_their_sum(
    cost: EngineCost, steps: int, batch: int, context: int
) -> None:
    one_by_one = sum(cost.step_s(batch, context + j * batch) for j in range(steps))
    assert cost.steps_s(steps, batch, context) == pytest.approx(one_by_one, rel=1e-9)


@given(steps=st.integers(0, 3000), batch=st.integers(1, 600), share=st.floats(0.01, 1.0))
def test_steps_until_inverts_the_time(steps: int, batch: int, share: float) -> None:
    before = SMALL.steps_s(steps, batch, 1000 * batch)
    inside = before + share * SMALL.step_s(batch, 1000 * batch + steps * batch)
    assert SMALL.steps_until(inside * (1 - 1e-9), batch, 1000 * batch, most=10_000) == steps + 1


def test_work_is_never_more_than_the_time_it_takes() -> None:
    for batch in (1, 7, 64, 600):
        memory, compute = SMALL.work(300, 500, batch=batch)
        alone = SMALL.steps_s(300, batch, 500 * batch) / batch
        assert max(memory, compute) <= alone * (1 + 1e-9)


def test_tables_have_the_tail_that_was_asked_for() -> None:
    table = lognormal(median=0.05, p99=3.0)
    ordered = sorted(table.values)
    assert ordered[len(ordered) // 2] == pytest.approx(0.05, rel=0.01)
    assert ordered[int(0.99 * len(ordered))] == pytest.approx(3.0, rel=0.05)
    assert (
        table.at(12345)
        == table.at(12345 + len(ordered))
        == lognormal(median=0.05, p99=3.0).at(12345)
    )
