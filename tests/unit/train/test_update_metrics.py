"""What a step says of several updates."""

from __future__ import annotations

from agentrl.train.update_metrics import combine


def test_metrics_of_updates_are_put_together_by_their_kind() -> None:
    first = {"correction/is_max": 2.0, "correction/is_mean": 1.0}
    second = {"correction/is_max": 4.0, "correction/is_mean": 2.0}
    assert combine(
        [
            first | {"ratio_max": 5.0, "loss": 1.0, "skipped": 0.0, "micro_batches": 1},
            second | {"ratio_max": 3.0, "loss": 2.0, "skipped": 1.0, "micro_batches": 3},
        ],
        role="actor",
    ) == {
        "correction/is_max": 4.0,
        "correction/is_mean": 1.5,
        "actor/ratio_max": 5.0,
        "actor/loss": 1.5,
        "actor/micro_batches": 2.0,
        "actor/updates": 2,
        "actor/skipped_updates": 1,
    }
