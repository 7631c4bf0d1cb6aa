from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from agentrl_envs.code_sandbox import demos
from agentrl_envs.code_sandbox.generate import (
    LEVELS,
    SPLIT_SIZES,
    GeneratedTasks,
    compositions,
    is_held_out,
    split_of,
    stratum_period,
)
from agentrl_envs.code_sandbox.operations import OPERATIONS, apply_program, program_source

from agentrl.errors import ConfigError
from agentrl.types import Task

SPLITS = tuple(SPLIT_SIZES)


def _operations_of(task: Task) -> list[str]:
    return [phrase.split()[0] for phrase in task.data["description"].split(" then ")]


def test_operation_names_are_unique() -> None:
    assert len({op.name for op in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize("level", LEVELS)
def test_every_example_refutes_every_wrong_reading(level: int) -> None:
    for split in SPLITS:
        for task in GeneratedTasks(level, split)[:60]:
            readings, answer = task.data["readings"], task.data["answer"]
            for x, y in task.data["visible"] + task.data["hidden"]:
                right = [apply_program(program, x) == y for program in readings]
                assert right == [i == answer for i in range(len(readings))], task.id


def test_the_source_of_a_program_computes_what_the_generator_says() -> None:
    task = GeneratedTasks(3, "train")[5]
    scope: dict = {}
    exec(program_source(task.data["readings"][task.data["answer"]]), scope)
    for x, y in task.data["visible"] + task.data["hidden"]:
        assert scope["f"](list(x)) == y


def test_examples_of_a_task_have_different_inputs() -> None:
    for task in GeneratedTasks(1, "test")[:100]:
        inputs = [tuple(x) for x, _ in task.data["visible"] + task.data["hidden"]]
        assert len(set(inputs)) == len(inputs)
        assert len(task.data["visible"]) >= 2


def test_tasks_depend_on_seed_and_index_alone() -> None:
    once, again = GeneratedTasks(1, "train", seed=3), GeneratedTasks(1, "train", seed=3)
    assert [again[i] for i in (7, 2, 7)] == [once[7], once[2], once[7]]
    assert once[0:20] != GeneratedTasks(1, "train", seed=4)[0:20]


def test_splits_are_disjoint_by_description_whatever_level_and_seed() -> None:
    seen: dict[str, str] = {}
    for level, split, seed in itertools.product((1, 2), SPLITS, (0, 1)):
        for task in GeneratedTasks(level, split, seed=seed)[:300]:
            assert seen.setdefault(task.data["description"], split) == split


def test_pairs_held_out_occur_in_the_unseen_stratum_alone() -> None:
    by_name = {op.name: op for op in OPERATIONS}
    for level, split in itertools.product(LEVELS, SPLITS):
        for task in GeneratedTasks(level, split)[:160]:
            pairs = itertools.pairwise(_operations_of(task))
            held_out = any(is_held_out(by_name[a], by_name[b]) for a, b in pairs)
            assert held_out == (task.tags["pairs"] == "unseen")
            assert split == "test" or not held_out


def test_no_operation_is_held_out_of_most_pairs() -> None:
    for op in OPERATIONS:
        others = [other for other in OPERATIONS if other is not op]
        assert sum(is_held_out(op, other) for other in others) <= len(others) // 4


def test_a_seen_pair_without_parameters_is_trained_on() -> None:
    assert split_of("sort then reverse") == "train"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
def test_strata_have_equal_shares_in_each_period(level: int, split: str) -> None:
    period = stratum_period(level, split)
    tasks = GeneratedTasks(level, split)

    def strata(start: int) -> Counter:
        part = tasks[start : start + period]
        return Counter((task.tags["readings"], task.tags["pairs"]) for task in part)

    assert strata(0) == strata(period) == strata(5 * period)
    assert {task.tags["readings"] for task in tasks[:period]} == {
        str(n) for n in LEVELS[level].num_readings
    }
    assert len(tasks) % period == 0


def test_the_test_split_has_the_difficulty_of_train_and_no_task_twice() -> None:
    def share_of_two(split: str) -> float:
        tasks = GeneratedTasks(1, split)[:1024]
        return sum(task.tags["readings"] == "2" for task in tasks) / len(tasks)

    assert share_of_two("test") == share_of_two("train") == 0.5
    tasks = GeneratedTasks(1, "test")[:]
    assert len({task.data["prompt"] for task in tasks}) == len(tasks) == 1024
    assert sum(task.tags["pairs"] == "unseen" for task in tasks) == 256


def test_every_stratum_has_compositions() -> None:
    for level, spec in LEVELS.items():
        for num_readings, unseen in itertools.product(set(spec.num_readings), (False, True)):
            assert compositions(level, num_readings, unseen), (level, num_readings, unseen)


def test_indexing_follows_sequences() -> None:
    tasks = GeneratedTasks(1, "val", size=10)
    assert tasks[-1] == tasks[9] and len(tasks[4:]) == 6 and len(list(tasks)) == 10
    with pytest.raises(IndexError):
        tasks[10]


@pytest.mark.parametrize(
    ("level", "split", "size"), [(4, "train", None), (1, "dev", None), (1, "val", 0)]
)
def test_bad_arguments_are_refused(level: int, split: str, size: int | None) -> None:
    with pytest.raises(ConfigError, match="got"):
        GeneratedTasks(level, split, size=size)


def test_scores_of_the_scripted_policies_are_in_order() -> None:
    tasks = GeneratedTasks(1, "val")[:400]
    rates = {
        script.__name__: demos.success_rate(script, tasks, 0)
        for script in (
            demos.random_program,
            demos.guess,
            demos.imperfect,
            demos.persistent,
            demos.oracle,
        )
    }
    assert rates["random_program"] < 0.02
    assert 0.35 < rates["guess"] < 0.48
    assert 0.43 < rates["imperfect"] < 0.60
    assert rates["persistent"] == rates["oracle"] == 1.0


def test_after_a_failed_check_demonstrations_go_on_to_a_new_reading() -> None:
    num_retries = 0
    for demonstration in itertools.islice(demos.demonstrations("train", 0), 300):
        messages = demonstration.messages or []
        failed: set[str] = set()
        for call, answer in itertools.pairwise(messages[2:-1]):
            if answer["role"] != "tool":
                continue
            code = call["tool_calls"][0]["function"]["arguments"]["code"]  # pyright: ignore
            program = code.removesuffix("\ncheck(f)")
            passed = answer["content"] == "2/2 pass"
            if failed and not passed and code != program:
                assert program not in failed
                num_retries += 1
            if answer["content"] == "0/2 pass":
                failed.add(program)
    assert num_retries > 20


def test_demonstrations_are_reproducible_and_differ_by_seed() -> None:
    def first(seed: int) -> list:
        return [d.messages for d in itertools.islice(demos.demonstrations("train", seed), 20)]

    assert first(1) == first(1) != first(2)


def test_demonstrations_come_from_the_split_asked_for() -> None:
    for demonstration in itertools.islice(demos.demonstrations("val", 0), 50):
        assert split_of(demonstration.task.data["description"]) == "val"


def test_a_script_played_on_messages_writes_down_the_same_episode() -> None:
    """What the real environment would answer stands in the written episode."""
    for index, task in enumerate(GeneratedTasks(1, "train")[:50]):
        written = demos.write_down(task, demos.imperfect(task, random.Random(index)))
        policy = demos.Scripted(demos.imperfect(task, random.Random(index)))
        for position, message in enumerate(written):
            if message["role"] != "assistant":
                continue
            turn = policy(written[:position])
            calls = message.get("tool_calls") or []
            assert turn.content == message["content"]
            assert [call.arguments for call in turn.tool_calls] == [
                call["function"]["arguments"] for call in calls
            ]
