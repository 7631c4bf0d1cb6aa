"""Groups of trajectories cross processes as few bytes and as memory that is shared."""

from __future__ import annotations

import pickle

import numpy as np

from agentrl.testing.sessions import make_group, make_session
from agentrl.types import TrajectoryGroup


def test_token_arrays_are_pickled_out_of_band() -> None:
    masks = [[0] * 500 + [1] * 500]
    members = [make_session(f"m{i}", 1.0, masks, sample_index=i) for i in range(4)]
    group = make_group(*members)
    segments = [segment for member in group.trajectories for segment in member.segments]
    names = ("ids", "loss_mask", "logprobs", "policy_version", "roles")
    num_bytes = sum(getattr(segment, name).nbytes for segment in segments for name in names)
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(group, protocol=5, buffer_callback=buffers.append)
    assert sum(len(buffer.raw()) for buffer in buffers) == num_bytes
    assert len(frame) < num_bytes / 5

    memory = [bytes(buffer.raw()) for buffer in buffers]
    again: TrajectoryGroup = pickle.loads(frame, buffers=memory)
    shared = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in memory}
    for one, other in zip(group.trajectories, again.trajectories, strict=True):
        assert (one.id, one.score, one.turns) == (other.id, other.score, other.turns)
        for first, second in zip(one.segments, other.segments, strict=True):
            for name in names:
                value = getattr(second, name)
                assert np.array_equal(getattr(first, name), value)
                assert value.ctypes.data in shared, "copied on the way in"
