from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.envs import _facts
from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig
from agentrl.env.findings import Finding, Level, error, grouped, warning
from agentrl.errors import ConfigError, EnvError, RegistryError

GOOD = '''
import random
from agentrl.env.base import Demonstration, Env, ScriptedTurn
from agentrl.types import Score, Task

class Good(Env):
    """Say the word."""

    process = False

    def tasks(self, split):
        return [Task(id=f"{split}-{i}", data={"word": f"{split}{i}"}) for i in range(5)]

    def reset(self, *, seed=None, options=None):
        self.word = self.pick_task(seed, options).data["word"]
        self.turn = 0
        return f"Say {self.word}", {}

    def step(self, action):
        self.turn += 1
        return "again", float(action.text == self.word), self.turn == 2, False, {}

    def demonstrations(self, split, seed):
        for task in self.tasks(split):
            yield Demonstration(task=task, policy=lambda messages: ScriptedTurn(content="hi"))
'''


def findings_of(tmp_path: Path, body: str, **config: Any) -> list[Finding]:
    """Check a class ``Mine(Good)`` with the given body."""
    source = tmp_path / "env.py"
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    source.write_text(f"{GOOD}\nclass Mine(Good):\n{indented}")
    return asyncio.run(check_env(EnvConfig(id=f"{source}:Mine", **config)))


def test_a_good_environment_has_no_findings(tmp_path: Path) -> None:
    assert findings_of(tmp_path, "pass") == []


ONE_TASK = "def tasks(self, split): return [Task(id=split, data={'word': split, "
YIELD = """
def demonstrations(self, split, seed):
    T = self.tasks(split)[0]
    yield {}
"""
ERRORS = {
    "def __init__(self): raise OSError('no server')": "no server",
    "def tasks(self, split): return []": r"tasks\('train'\) is empty",
    "def tasks(self, split): return ['a']": "holds a str",
    "def tasks(self, split): raise KeyError(split)": "raised KeyError",
    "def tasks(self, split): return [Task(id='x', data={'word': split})] * 2": "id 'x' twice",
    "def tasks(self, split): return [Task(id=split, data={})]": "val tasks .* are in train too",
    ONE_TASK + "'f': len})]": "cannot be stored",
    ONE_TASK + "'n': float('nan')})]": "cannot be stored",
    ONE_TASK + "}, tags={'n': 1})]": "tags that are not text",
    ONE_TASK + "'n': 1}, tags={}) for split in [split + str(random.random())]]": "when asked again",
    "def reset(self, *, seed=None, options=None): return None": "reset must return",
    """
def reset(self, *, seed=None, options=None):
    super().reset(seed=seed, options=options)
    return f'Say {random.random()}', {}
""": "two runs .* differ: observation of reset is 'Say",
    "def step(self, action): return 'a', random.random(), True, False, {}": "reward of step 1",
    "def step(self, action): return 'a', float('nan'), True, False, {}": "RewardError.*not finite",
    "def step(self, action): return action.text[0], 0.0, True, False, {}": "message ''.*IndexError",
    "def demonstrations(self, split, seed): yield 1 / 0": "demonstrations raised ZeroDivision",
    """
def demonstrations(self, split, seed):
    yield Demonstration(task=self.tasks(split)[0])
""": "neither messages nor policy",
    YIELD.format("3"): "3 is a int",
    YIELD.format("Demonstration(task='t0', policy=print)"): "a task that is a str",
    YIELD.format("Demonstration(task=T, policy=lambda m: m['x'])"): "its policy raised TypeError",
    YIELD.format("Demonstration(task=T, policy=lambda m: 'hi')"): "its policy returned 'hi'",
    YIELD.format("Demonstration(task=T, messages=[{'content': 'x'}])"): "cannot be read: KeyError",
    YIELD.format(
        "Demonstration(task=T, messages=[{'role': 'assistant', 'tool_calls': [{}]}])"
    ): "cannot be read: KeyError",
}
WARNINGS = {
    ONE_TASK + "'t': (1,)})]": "reads back from JSON as something else",
    "def step(self, action): return 'on', 0.0, False, False, {}": "stops before the episode ends",
    """
def demonstrations(self, split, seed):
    said = [{'role': 'user', 'content': f'Say {split}0'}, {'role': 'assistant', 'content': 'y'}]
    yield Demonstration(task=self.tasks(split)[0], messages=said)
""": "stops before the episode ends",
}


@pytest.mark.parametrize("body", [*ERRORS, *WARNINGS])
def test_what_is_wrong_is_found(tmp_path: Path, body: str) -> None:
    findings = findings_of(tmp_path, body)
    message = ERRORS.get(body) or WARNINGS[body]
    matching = [finding for finding in findings if re.search(message, finding.what)]
    assert matching, findings
    assert matching[0].level is (Level.ERROR if body in ERRORS else Level.WARNING)
    assert all(finding.fix for finding in findings)


def test_a_policy_that_hangs_is_found_and_the_check_ends(tmp_path: Path) -> None:
    wait = "__import__('threading').Event().wait()"
    body = YIELD.format(f"Demonstration(task=T, policy=lambda m: {wait})")
    (finding,) = findings_of(tmp_path, body, step_timeout_s=0.2)
    assert "its policy did not return within 0.2 s" in finding.what


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_that_never_comes_is_found_and_the_check_ends(tmp_path: Path, split: str) -> None:
    body = f"""
def tasks(self, split):
    import threading
    if split == {split!r}: threading.Event().wait()
    return super().tasks(split)
"""
    # Demonstrations ask for the tasks too, with the deadline of a reset.
    findings = findings_of(tmp_path, body, tasks_timeout_s=0.2, reset_timeout_s=0.5)
    assert findings[0].level is Level.ERROR
    assert re.search(
        rf"tasks\('{split}'\) of environment '.*Mine' did not return within 0.2 s",
        findings[0].what,
    )
    assert "env.tasks_timeout_s" in findings[0].fix


SAID = [
    {"role": "user", "content": "Say train0"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "train0"},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
USES_A_TOOL = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL_ANSWER = {"role": "tool", "name": "f", "content": "1"}
GOOD_MESSAGES = [
    SAID,
    [*SAID, {"role": "user", "content": "whatever comes after the last turn"}],
    [SAID[0], USES_A_TOOL, TOOL_ANSWER, *SAID[2:]],
]
BAD_MESSAGES = [
    ([{"role": "user", "content": "Say it"}, *SAID[1:]], "opens with user 'Say it' where reset"),
    ([{"role": "system", "content": "Be brief."}, *SAID], "opens with system 'Be brief.', user"),
    (SAID[1:], "opens with nothing where reset returns user 'Say train0'"),
    ([{**SAID[0], "role": "system"}, *SAID[1:]], "opens with system 'Say train0'"),
    ([*SAID[:2], {"role": "user", "content": "more"}, SAID[3]], "has user 'more' where step 1"),
    ([*SAID[:2], SAID[3]], "has nothing where step 1 returns user 'again'"),
    ([*SAID, SAID[2], SAID[3]], "has 3 turns where the episode ends after 2"),
    ([SAID[0], USES_A_TOOL, *SAID[2:]], "answers 0 of the 1 tool calls before step 1"),
]


def with_messages(messages: list[dict[str, Any]]) -> str:
    return f"""
def demonstrations(self, split, seed):
    yield Demonstration(task=self.tasks(split)[0], messages={messages!r})
"""


@pytest.mark.parametrize(("messages", "what"), BAD_MESSAGES)
def test_a_demonstration_says_what_the_environment_says(
    tmp_path: Path, messages: list[dict[str, Any]], what: str
) -> None:
    (finding,) = findings_of(tmp_path, with_messages(messages))
    assert finding.level is Level.ERROR and what in finding.what
    assert "'train-0'" in finding.what


@pytest.mark.parametrize("messages", GOOD_MESSAGES)
def test_a_demonstration_that_follows_the_environment_is_fine(
    tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    assert findings_of(tmp_path, with_messages(messages)) == []


def test_findings_of_one_kind_are_grouped_in_order() -> None:
    findings = [
        error("task 'a' broke after 3 steps", "mend it"),
        warning("task 'a' broke after 3 steps", "mend it"),
        error('task "b\'c" broke after 12 steps', "mend it"),
        error("task 'a' broke after 3 steps", "other fix"),
        error("task 'd' broke after 3 steps", "mend it"),
    ]
    assert grouped(findings) == [(findings[0], 2), (findings[1], 0), (findings[3], 0)]
    assert grouped([]) == []


def test_a_hang_is_a_finding(tmp_path: Path) -> None:
    body = "def step(self, action):\n    import time\n    time.sleep(3)"
    findings = findings_of(tmp_path, body, step_timeout_s=0.1, max_leaked_threads=100)
    assert any("EnvTimeout" in finding.what for finding in findings)
    body = "def tasks(self, split):\n    import time\n    time.sleep(1)\n    return []"
    findings = findings_of(tmp_path / "..", body, reset_timeout_s=0.2)
    assert any("tasks did not return within 0.2 s" in finding.what for finding in findings)


def test_missing_demonstrations_are_worth_a_note(tmp_path: Path) -> None:
    (finding,) = findings_of(tmp_path, "demonstrations = Env.demonstrations")
    assert finding.level is Level.INFO and "demonstrations" in finding.what


def test_tools_are_looked_up(tmp_path: Path) -> None:
    def resolve(name: str) -> None:
        raise RegistryError(f"unknown tool {name!r}")

    source = tmp_path / "env.py"
    source.write_text(f"{GOOD}\nclass Mine(Good):\n    tools = ('hammer',)\n")
    findings = asyncio.run(check_env(EnvConfig(id=f"{source}:Mine"), resolve_tool=resolve))
    assert [f.level for f in findings] == [Level.ERROR] and "hammer" in findings[0].what


def test_errors_come_first_and_the_user_is_told_of_wrong_arguments(tmp_path: Path) -> None:
    findings = findings_of(
        tmp_path,
        "demonstrations = Env.demonstrations\ndef tasks(self, split): return []",
    )
    levels = [list(Level).index(finding.level) for finding in findings]
    assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == 2
    with pytest.raises(ConfigError):
        findings_of(tmp_path, "pass", kwargs={"no_such": 1})


def test_an_asynchronous_environment_is_checked_too() -> None:
    file = Path(__file__).with_name("misbehaving.py")
    findings = asyncio.run(check_env(EnvConfig(id=f"{file}:Coroutines")))
    assert [finding.level for finding in findings] == [Level.INFO]


@pytest.mark.parametrize(
    "body",
    [
        "def tasks(self, split): raise ValueError('no')",
        "def tasks(self, split): raise SystemExit(0)",
        "def tasks(self, split): return [3]",
        "def reset(self, *, seed=None, options=None): raise ValueError('no')",
        "tools = 3",
    ],
)
def test_showing_a_broken_environment_is_one_error(tmp_path: Path, body: str) -> None:
    path = tmp_path / "env.py"
    path.write_text(f"{GOOD}\n    {body}\n")
    with pytest.raises(EnvError):
        _facts(EnvConfig(id=f"{path}:Good"), "train")
