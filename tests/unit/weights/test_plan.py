"""A plan is whole, bounded, without overlap, and the same for sender and receiver."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import EngineError
from agentrl.weights.plan import BucketPlan, ordered_like
from agentrl.weights.served import WeightSpec

DTYPES = ("float32", "bfloat16", "int64", "uint8")


@st.composite
def spec_lists(draw: st.DrawFn) -> list[WeightSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=12))
    return [
        WeightSpec(name=f"w{i}", shape=tuple(shape), dtype=draw(st.sampled_from(DTYPES)))
        for i, shape in enumerate(shapes)
    ]


@settings(max_examples=60, deadline=None)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 2000))
def test_every_tensor_has_its_own_place(specs: list[WeightSpec], bucket_bytes: int) -> None:
    plan = pickle.loads(pickle.dumps(BucketPlan.of(specs, bucket_bytes=bucket_bytes)))
    placed = [(s.name, s.shape, s.dtype) for bucket in plan.buckets for s in bucket.slices]
    assert placed == [(spec.name, spec.shape, spec.dtype) for spec in specs]
    for bucket in plan.buckets:
        assert bucket.num_bytes <= max(bucket_bytes, bucket.slices[0].num_bytes)
        assert len(bucket.slices) == 1 or bucket.num_bytes <= bucket_bytes
        end = 0
        for piece in bucket.slices:
            assert piece.offset >= end and piece.offset % 64 == 0
            end = piece.offset + piece.num_bytes
        assert end == bucket.num_bytes <= plan.slot_bytes
    assert plan.num_bytes == sum(
        torch.empty(s.shape, dtype=getattr(torch, s.dtype)).nbytes for s in specs
    )


@settings(max_examples=40, deadline=None)
@given(specs=spec_lists(), seed=st.integers(0, 1000), bucket_bytes=st.integers(1, 500))
def test_buckets_fill_from_a_stream_in_any_order(
    specs: list[WeightSpec], seed: int, bucket_bytes: int
) -> None:
    plan = BucketPlan.of(specs, bucket_bytes=bucket_bytes)
    params = {spec.name: torch.zeros(spec.shape) for spec in specs}
    order = torch.randperm(len(specs), generator=torch.Generator().manual_seed(seed)).tolist()
    filled = list(plan.fill((specs[i].name, params[specs[i].name]) for i in order))
    assert len(filled) == len(plan.buckets)
    for bucket, tensors in zip(plan.buckets, filled, strict=True):
        assert [id(value) for value in tensors] == [id(params[s.name]) for s in bucket.slices]


def test_a_bucket_leaves_before_the_next_tensors_are_made() -> None:
    specs = [WeightSpec(name=f"w{i}", shape=(100,), dtype="float32") for i in range(10)]
    plan = BucketPlan.of(specs, bucket_bytes=1000)
    made = 0

    def stream():
        nonlocal made
        for spec in specs:
            made += 1
            yield spec.name, torch.zeros(spec.shape)

    buckets = plan.fill(stream())
    assert len(next(buckets)) == 2 and made == 2
    assert len(next(buckets)) == 2 and made == 4


SERVED = [
    WeightSpec(name="a", shape=(2, 3), dtype="bfloat16"),
    WeightSpec(name="b", shape=(4,), dtype="float32"),
]


def test_the_plan_follows_the_trainers_order_and_the_engines_dtypes() -> None:
    assert ordered_like(SERVED, [("b", (4,)), ("a", (2, 3))]) == [SERVED[1], SERVED[0]]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([("a", (2, 3))], r"1 tensors are served but not trained \['b'\]"),
        ([("a", (2, 3)), ("b", (4,)), ("c", (1,))], r"1 trained but not served \['c'\]"),
        ([("a", (3, 2)), ("b", (4,))], r"'a' has shape \(3, 2\) in training and \(2, 3\)"),
    ],
)
def test_other_names_or_shapes_refuse_to_start(
    sent: list[tuple[str, tuple[int, ...]]], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        ordered_like(SERVED, sent)
