"""Numbers of several sets of replicas as those of one."""

from __future__ import annotations

from agentrl.rollout.serving.stats import ServingStats, merged, metrics


def numbers(turns: int, prompt: int, cached: int, running: dict[int, int]) -> dict[str, float]:
    stats = ServingStats(
        turns=turns, prompt_tokens=prompt, known_prompt_tokens=prompt, cached_tokens=cached
    )
    return metrics(stats, running=running, waiting=1, serving=len(running))


def test_workers_are_summed_their_replicas_numbered_through_and_rates_weighted() -> None:
    found = merged([numbers(3, 100, 50, {0: 1, 1: 2}), numbers(4, 300, 0, {0: 5})])
    assert found["serving/turns"] == 7 and found["serving/replicas"] == 3
    assert found["serving/running"] == 8 and found["serving/waiting"] == 2
    assert [found[f"serving/replica_{i}/running"] for i in range(3)] == [1, 2, 5]
    assert found["serving/cache_hit_rate"] == 50 / 400


def test_one_worker_is_itself_and_none_says_nothing() -> None:
    alone = numbers(3, 100, 50, {0: 1})
    assert merged([alone]) == alone
    assert merged([]) == {}
