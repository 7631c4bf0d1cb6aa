"""Write a small program as a file, and be graded by running it somewhere else.

agentrl envs check ./examples/graded_files/env.py:WriteProgram
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl import Demonstration, Env, Score, Task
from agentrl.env.base import Episode, Observation
from agentrl.sandbox.grading import TAMPERING, find_tampering, grade_artifacts
from agentrl.seeding import derive_seed
from agentrl.types import Action, Message

SYSTEM = "Write main.py with edit_file. Try it with bash. Then say done."
GOALS = {"sum": sum, "largest": max, "smallest": min, "count": len}
CODE = {"sum": "sum(rows)", "largest": "max(rows)", "smallest": "min(rows)", "count": "len(rows)"}
WRITTEN = "wrote main.py: 2 lines"
GRADER = """
import json
cases = json.load(open("cases.json"))
passed = 0
for case in cases:
    ran = run(["python3", "-I", "main.py"], stdin=case["stdin"].encode(), timeout_s=2)
    passed += ran.exit_code == 0 and ran.stdout.decode(errors="replace").split() == [case["stdout"]]
report(passed / len(cases))
"""


class ProgramRubric:
    """Runs the program on inputs that the agent never saw, in a sandbox that it never was in."""

    async def score(self, episode: Episode) -> Score:
        """Return the fraction of right answers; success means all of them."""
        program = episode.artifacts.get("main.py", b"")
        verdict = await grade_artifacts(
            episode.sandboxes,
            artifacts={"main.py": program},
            grader=GRADER,
            tests={"cases.json": json.dumps(_cases(episode.task.data)).encode()},
            timeout_s=15.0,
        )
        signs = {*verdict.tampering, *find_tampering(program.decode(errors="replace"))}
        return Score(
            reward=verdict.score,
            success=verdict.score == 1.0,
            tampering=[name for name in TAMPERING if name in signs],
        )


class WriteProgram(Env):
    """main.py reads numbers from stdin, one a line, and prints their sum, largest, ..."""

    tools = ("edit_file", "bash")
    artifacts = ("main.py",)
    rubric = ProgramRubric()
    sandboxed = True

    def tasks(self, split: str) -> Sequence[Task]:
        """One goal, and hidden cases, in disjoint splits."""
        return [task for task in _all_tasks() if _split_of(task.id) == split]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """State the task."""
        return _opening(self.pick_task(seed, options).data), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Tools have already run; a turn without a call ends the episode."""
        return "", 0.0, not action.tool_calls, False, {}

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """Write the program, the wrong one half of the time."""
        rng = random.Random(f"{seed}:{split}")
        tasks = self.tasks(split)
        while True:
            task = rng.choice(tasks)
            goal = rng.choice([task.data["goal"], rng.choice(sorted(CODE))])
            program = f"rows = [int(row) for row in open(0)]\nprint({CODE[goal]})\n"
            arguments = {"path": "main.py", "command": "create", "new_text": program}
            call = {
                "type": "function",
                "function": {"name": "edit_file", "arguments": arguments},
            }
            messages: list[Message] = [
                *_opening(task.data),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "edit_file", "content": WRITTEN},
                {"role": "assistant", "content": "done"},
            ]
            success = goal == task.data["goal"]
            yield Demonstration(task=task, messages=messages, metadata={"success": success})


def _all_tasks() -> Iterator[Task]:
    for goal, number in itertools.product(GOALS, range(64)):
        yield Task(id=f"{goal}-{number}", data={"goal": goal, "number": number})


def _split_of(task_id: str) -> str:
    bucket = derive_seed(task_id) % 10
    return "test" if bucket < 2 else "val" if bucket < 3 else "train"


def _opening(data: Mapping[str, Any]) -> list[Message]:
    wanted = f"It reads integers, one a line, from stdin and prints the {data['goal']}."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": wanted}]


def _cases(data: Mapping[str, Any]) -> list[dict[str, str]]:
    rng = random.Random(f"cases:{data['goal']}:{data['number']}")
    rows = [[rng.randint(-50, 50) for _ in range(rng.randint(3, 9))] for _ in range(4)]
    return [
        {"stdin": "".join(f"{x}\n" for x in row), "stdout": str(GOALS[data["goal"]](row))}
        for row in rows
    ]
