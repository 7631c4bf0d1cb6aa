from __future__ import annotations

import json

from agentrl.telemetry.censoring import Fate, censoring_metrics, censoring_rows
from agentrl.testing.run_data import make_trajectory
from agentrl.types import StopReason


def test_counts_survive_the_metrics_file_and_add_up_over_steps() -> None:
    short = make_trajectory(seed=0, num_turns=1, env_id="./my/env.py:Env")
    long = make_trajectory(
        seed=1, num_turns=4, env_id="./my/env.py:Env", stop_reason=StopReason.ENV_TIMEOUT
    )
    assert short.num_sampled_tokens <= 64 < long.num_sampled_tokens
    first = censoring_metrics([(short, Fate.TRAINED, ""), (long, Fate.RETRIED, "")])
    second = censoring_metrics(
        [
            (short, Fate.DROPPED, "zero_variance"),
            (long, Fate.MASKED, ""),
            (long, Fate.MASKED, ""),
        ]
    )
    lines = json.loads(json.dumps([first, {"reward/mean": 1.0}, second]))
    low, high = censoring_rows(lines)
    assert (low.env_id, low.max_tokens) == ("./my/env.py:Env", 64)
    assert low.counts[Fate.TRAINED] == 1 and low.counts[Fate.DROPPED] == 1
    assert low.reasons == {"dropped: zero_variance": 1}
    assert low.censored_fraction == 0.5
    assert high.reasons == {"retried: env_timeout": 1, "masked: env_timeout": 2}
    assert high.total == 3 and high.censored_fraction == 1.0


def test_environments_and_lengths_are_kept_apart() -> None:
    items = [
        (make_trajectory(seed=i, num_turns=1 + i % 4, env_id=f"env{i % 2}"), Fate.TRAINED, "")
        for i in range(12)
    ]
    rows = censoring_rows([censoring_metrics(items)])
    assert sum(row.total for row in rows) == 12
    assert [row.env_id for row in rows] == sorted(row.env_id for row in rows)
    for trajectory, _, _ in items:
        assert any(
            row.env_id == trajectory.env_id
            and trajectory.num_sampled_tokens <= row.max_tokens
            and (row.max_tokens == 64 or trajectory.num_sampled_tokens > row.max_tokens // 2)
            for row in rows
        )


def test_nothing_gives_no_rows() -> None:
    assert censoring_metrics([]) == {}
    assert censoring_rows([]) == []
