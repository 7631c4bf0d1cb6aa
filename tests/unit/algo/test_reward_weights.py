from __future__ import annotations

from agentrl.algo.reward_weights import named_reward_problems

PARTS = {"correct": 1.0, "style": 0.0}


def problems(weights: dict[str, float], *, complete: bool = True) -> list[str]:
    return list(named_reward_problems(weights, PARTS, key="algo", complete=complete))


def test_names_that_exist_are_no_problem() -> None:
    assert problems({"outcome": 0, "turn": 1, "correct": 2, "correct/lines": 1, "style": 1}) == []
    assert problems({"outcome": 1, "style": 1}) == [], "the outcome does not hold it"
    assert problems({"outcome": 1, "correct": 0}) == []


def test_a_name_that_does_not_exist_is_refused_with_the_nearest() -> None:
    (problem,) = problems({"outcome": 0, "corect": 1})
    assert problem.startswith("algo.reward_weights.corect=1: no part")
    assert "did you mean correct? known: outcome, turn, tool, correct, style" in problem
    (problem,) = problems({"elegance": 1})
    assert "did you mean" not in problem


def test_where_there_may_be_others_only_a_slip_is_refused() -> None:
    assert problems({"elegance": 1, "tests": 1}, complete=False) == []
    assert len(problems({"outcom": 1}, complete=False)) == 1


def test_a_reward_that_would_count_twice_is_refused() -> None:
    (problem,) = problems({"outcome": 0.5, "correct": 2})
    assert "algo.reward_weights.correct=2 with outcome=0.5" in problem
    assert "set algo.reward_weights.outcome=0" in problem
