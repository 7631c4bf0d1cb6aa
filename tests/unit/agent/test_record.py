"""The token record: arrays that grow together, a mask that says who spoke."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.agent.record import TokenRecord
from agentrl.types import Generation, StopReason, TokenRole

USER = int(TokenRole.USER)


def generation(ids: list[int], version: int = 3) -> Generation:
    return Generation(
        ids=ids,
        logprobs=[-0.5] * len(ids),
        policy_version=[version] * len(ids),
        stop_reason=StopReason.STOP,
    )


def test_a_segment_is_the_sum_of_what_was_appended():
    record = TokenRecord()
    record.append_context([1, 2], [USER, USER], "ab", "ab")
    span = record.append_sampled(generation([3, 4, 5]), "cde")
    record.append_context([6], [int(TokenRole.TOOL)], "f", "f")
    segment = record.to_segment()
    assert span == (2, 5) and len(record) == len(segment) == 6
    assert segment.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert segment.loss_mask.tolist() == [False, False, True, True, True, False]
    assert segment.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5, 0.0]
    assert segment.policy_version.tolist() == [-1, -1, 3, 3, 3, -1]
    assert segment.roles.tolist() == [1, 1, 4, 4, 4, 2]


def test_the_arrays_have_the_declared_types():
    segment = TokenRecord().to_segment()
    assert segment.ids.dtype == np.int64 and segment.loss_mask.dtype == np.bool_
    assert segment.logprobs.dtype == np.float32 and segment.policy_version.dtype == np.int32
    assert segment.roles.dtype == np.int8 and len(segment) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("roles", USER), ("logprobs", None), ("policy_version", -1)],
)
def test_a_broken_invariant_is_a_crash(field: str, value: object):
    record = TokenRecord()
    record.append_context([1], [USER], "a", "a")
    record.append_sampled(generation([2]), "b")
    if value is None:
        record.logprobs[0] = -1.0
    else:
        getattr(record, field)[1] = value
    with pytest.raises(AssertionError):
        record.to_segment()
