"""Functions of files run in processes: a hang that holds the interpreter lock ends with them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentrl.env.process import ProcessWorker
from agentrl.errors import RewardError, RewardTimeout
from agentrl.reward.part import Part
from agentrl.reward.process import ProcessFunction
from agentrl.reward.rubric import ComposedRubric

SOURCE = """
import asyncio, os, re, sys, time

lock = None

async def later():
    global lock  # belongs to one event loop for good once two have waited for it
    lock = lock or asyncio.Lock()
    async with lock:
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
    await waiting
    lock.release()
    return {"score": 0.5, "pid": os.getpid()}

async def blocks():
    time.sleep(600)

async def cancels():
    raise asyncio.CancelledError

async def exits():
    sys.exit(0)

async def sandboxed(episode):
    async with await episode.sandboxes.acquire():
        return 1.0

def grade(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "hang":
        re.match(r"(a+)+$", "a" * 64 + "b")  # backtracks for ever with the interpreter locked
    if solution_str == "die":
        os._exit(3)
    if solution_str == "coroutine":
        return later()
    if solution_str == "blocks":
        return blocks()
    if solution_str == "cancels":
        return cancels()
    if solution_str == "exits":
        return exits()
    if solution_str == "score":
        from agentrl import Score
        return Score(reward=float("nan"), success=True)
    if solution_str == "raise":
        raise ValueError("cannot read this")
    if solution_str == "odd":
        return "1.0"
    print("graded")
    return {"score": float(solution_str == ground_truth) + bonus, "pid": os.getpid()}
"""
DATA = {"data_source": "s", "ground_truth": "yes"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "r.py").write_text(SOURCE)
    return f"{tmp_path}/r.py:grade"


def part(path: str, timeout_s: float = 60.0, processes: int = 1) -> Part:
    grader = ProcessFunction(path, part="p", kwargs={"bonus": 0.25}, processes=processes)
    return Part("p", grader, timeout_s=timeout_s)


def test_a_function_grades_in_a_child(path: str, make_episode):
    async def main():
        rubric = ComposedRubric(part(path))
        await rubric.open()
        try:
            return [await rubric.score(make_episode(said, data=DATA)) for said in ("yes", "no")]
        finally:
            await rubric.close()

    right, wrong = asyncio.run(asyncio.wait_for(main(), 120))
    assert (right.reward, right.success) == (1.25, True)
    assert wrong.reward == 0.25
    assert right.parts["p/pid"] == wrong.parts["p/pid"] != os.getpid()


def test_what_fails_costs_its_own_episode_and_names_the_part(path: str, make_episode):
    async def main() -> list[str]:
        tested = part(path, timeout_s=3.0)
        said = []
        await tested.open()
        try:
            for text, kind in (
                ("raise", RewardError), ("odd", RewardError), ("die", RewardError),
                ("hang", RewardTimeout),
            ):  # fmt: skip
                with pytest.raises(kind) as caught:
                    await tested.grade(make_episode(text, data=DATA))
                said.append(str(caught.value))
                assert (await tested.grade(make_episode("yes", data=DATA))).value == 1.25
        finally:
            await tested.close()
        return said

    raised, odd, died, hung = asyncio.run(asyncio.wait_for(main(), 240))
    assert "reward part 'p'" in raised and "ValueError: cannot read this" in raised
    assert f"reward part 'p': {path}: the reward must be a float, got '1.0'" in odd
    assert "exit code 3" in died
    assert "no answer within timeout_s=3" in hung
    for message in (raised, odd, died, hung):
        assert message.startswith(f"reward part 'p': {path}: ")
        assert "environment" not in message and "rollout.reward_timeout_s" not in message


HOSTILE = """
import json

def grade(data_source, solution_str, ground_truth, extra_info=None):
    kind, _, text = solution_str.partition(":")
    if kind == "number":
        return float(int("9" * 10**7) == 1)
    if kind == "power":
        return float(eval(text) == 1)  # holds the interpreter lock for ever
    if kind == "nested":
        return float(json.loads("[" * 10**6) == 1)
    if kind == "huge":
        return float(len("x" * int(text)) == 1)
    if kind == "grows":
        rows = []
        while True:
            rows.append(bytearray(1 << 20))
    return 1.0
"""


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("number:", RewardError),
        ("power:10**10**10", RewardTimeout),
        ("nested:", RewardError),
        ("huge:10000000000", RewardError),
        ("grows:", RewardError),
    ],
)
def test_text_that_explodes_in_a_parser_is_an_error_and_the_next_is_graded(
    said: str, kind: type[Exception], tmp_path: Path, make_episode
) -> None:
    (tmp_path / "r.py").write_text(HOSTILE)
    grader = ProcessFunction(f"{tmp_path}/r.py:grade", part="p", processes=1, memory_mb=256)
    tested = Part("p", grader, timeout_s=3.0)

    async def main() -> float:
        await tested.open()
        try:
            with pytest.raises(kind):
                await tested.grade(make_episode(said, data=DATA))
            return (await tested.grade(make_episode("fine", data=DATA))).value
        finally:
            await tested.close()

    assert asyncio.run(asyncio.wait_for(main(), 120)) == 1.0


def test_a_coroutine_is_awaited_in_the_child_and_blocks_nothing_else(path: str, make_episode):
    async def main() -> list[str]:
        tested = part(path, timeout_s=3.0)
        said = []
        await tested.open()
        try:
            for _ in range(2):
                grade = await tested.grade(make_episode("coroutine", data=DATA))
                assert grade.value == 0.5
                assert grade.entries["p/pid"] != os.getpid()
            for text in ("cancels", "exits", "score", "blocks"):
                with pytest.raises(RewardError) as caught:
                    await tested.grade(make_episode(text, data=DATA))
                said.append(str(caught.value))
        finally:
            await tested.close()
        return said

    cancelled, exited, odd, blocked = asyncio.run(asyncio.wait_for(main(), 120))
    assert "raised CancelledError" in cancelled
    assert "raised SystemExit" in exited
    assert "not finite" in odd
    assert "no answer within timeout_s=3" in blocked
    for message in (cancelled, exited, odd, blocked):
        assert message.startswith("reward part 'p': ")
        assert "environment" not in message


def test_a_child_has_no_sandboxes_and_says_where_they_are(tmp_path: Path, make_episode):
    (tmp_path / "r.py").write_text(SOURCE)

    async def main() -> None:
        tested = Part("p", ProcessFunction(f"{tmp_path}/r.py:sandboxed", part="p"), timeout_s=60)
        with pytest.raises(RewardError, match=r"reward part 'p'.*set reward\.process=false"):
            await tested.grade(make_episode("x"))
        await tested.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_an_episode_that_cannot_travel_is_an_error_of_the_reward(path: str, make_episode):
    async def main() -> None:
        tested = part(path)
        with pytest.raises(RewardError, match="cannot be sent to the reward function's process"):
            await tested.grade(make_episode("yes", data={**DATA, "odd": lambda: 1}))
        await tested.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_cancelled_grading_leaves_no_child_behind(path: str, make_episode):
    async def main() -> None:
        tested = part(path)
        grader = tested.grader
        assert isinstance(grader, ProcessFunction)
        await tested.open()
        worker = grader._idle[0].worker
        assert isinstance(worker, ProcessWorker)
        grading = asyncio.create_task(tested.grade(make_episode("hang", data=DATA)))
        while not grader._busy:
            await asyncio.sleep(0.01)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        assert worker._process.poll() is not None
        assert (await tested.grade(make_episode("yes", data=DATA))).value == 1.25
        await tested.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_episodes_beyond_the_number_of_processes_wait(path: str, make_episode):
    async def main() -> set[float]:
        tested = part(path, processes=2)
        await tested.open()
        episodes = [make_episode("yes", data=DATA) for _ in range(8)]
        grades = await asyncio.gather(*(tested.grade(episode) for episode in episodes))
        await tested.close()
        return {grade.entries["p/pid"] for grade in grades}

    assert 1 <= len(asyncio.run(asyncio.wait_for(main(), 120))) <= 2


def test_what_a_child_cannot_import_is_known_when_it_is_opened(tmp_path: Path):
    async def main() -> None:
        with pytest.raises(Exception, match="reward part 'p'.*no_such_module"):
            await part(f"{tmp_path}/broken.py:f").open()

    (tmp_path / "broken.py").write_text("import no_such_module\ndef f(episode): return 1.0\n")
    asyncio.run(asyncio.wait_for(main(), 120))
