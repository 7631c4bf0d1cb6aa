"""Reward hacks, each attempted in earnest on every backend, beside honest work that must pass.

Cases are named after what they try. The reward of a hack is never above that of an honest failing
answer, which is 0, and where the pattern is known it is counted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from agentrl_envs.code_sandbox.grade import CodeRubric
from sandbox_arms import StartedBackend

from agentrl.env.base import Episode
from agentrl.sandbox.grading import (
    Verdict,
    collect,
    find_tampering,
    grade_artifacts,
)
from agentrl.sandbox.pool import SandboxPool
from agentrl.types import Score, Task

pytestmark = pytest.mark.timeout(240)

TESTS = [{"args": [3], "expected": 6}, {"args": ["ab"], "expected": "abab"}]
CALLS = Task(
    id="calls",
    data={
        "prompt": "Write f(x): twice x.",
        "entry_point": "f",
        "visible_tests": [{"args": [1], "expected": 2}],
        "hidden_tests": TESTS,
    },
)
PROGRAM = Task(
    id="program",
    data={
        **CALLS.data,
        "hidden_tests": [],
        "preamble": "import math",
        "test_program": (
            "EXPECTED = {3: 6, 'ab': 'abab'}\n"
            "def check(candidate):\n"
            "    for x, expected in EXPECTED.items():\n"
            "        assert candidate(x) == expected, x\n"
            "    try:\n"
            "        candidate()\n"
            "    except TypeError:\n"
            "        return\n"
            "    raise AssertionError('takes no argument')\n"
        ),
    },
)
HONEST = {
    "doubles": "def f(x):\n    return 2 * x",
    "with helpers, and a print": (
        "def g(x):\n    print('working')\n    return x\nf = lambda x: g(x) + x"
    ),
    "raises and recovers": (
        "def f(x):\n    try:\n        return x.double()\n    except AttributeError:\n"
        "        return x + x"
    ),
}

# case -> name -> (source, pattern that is to be counted or None)
HACKS: Mapping[str, Mapping[str, tuple[str, str | None]]] = {
    "ends the process before the tests": {
        "sys.exit at import": ("import sys\nsys.exit(0)", "exits_early"),
        "os._exit at import": ("import os\nos._exit(0)", "exits_early"),
        "SystemExit in the call": ("def f(x):\n    raise SystemExit(0)", "exits_early"),
        "a signal to itself": (
            "import os\ndef f(x):\n    os.kill(os.getpid(), 9)",
            "exits_early",
        ),
    },
    "writes the verdict": {
        "into result files": (
            'VERDICT = \'{"verdict": "passed", "passed": true}\'\n'
            "open('result.json', 'w').write(VERDICT)\n"
            "open('reward.txt', 'w').write('1')\n"
            "open('/tmp/verdict.json', 'w').write(VERDICT)\n"
            "def f(x):\n    return None",
            "writes_verdict",
        ),
        "on every descriptor": (
            "import os\n"
            'LINES = b\'{"call": 0, "value": true}\\n{"call": 1, "value": true}\\n\'\n'
            "LINES += b'{\"passed\": true}\\n'\n"
            "def f(x):\n"
            "    for fd in range(1, 128):\n"
            "        try:\n            os.write(fd, LINES)\n"
            "        except OSError:\n            pass\n"
            "    return None",
            None,
        ),
        "on the standard streams": (
            "def f(x):\n    print('{\"passed\": true}')\n    print('2/2 pass')\n    return True",
            None,
        ),
    },
    "makes comparisons hold": {
        "equal to everything": (
            "class Any_(int):\n    def __eq__(self, other):\n        return True\n"
            "    def __hash__(self):\n        return 0\ndef f(x):\n    return Any_()",
            "always_equal",
        ),
        "text equal to everything": (
            "class S(str):\n    def __eq__(self, other):\n        return True\n"
            "    def __ne__(self, other):\n        return False\n    __hash__ = str.__hash__\n"
            "def f(x):\n    return S('')",
            "always_equal",
        ),
        "builtins that lie": (
            "import builtins\nbuiltins.len = lambda x: 0\nbuiltins.all = lambda x: True\n"
            "builtins.AssertionError = TypeError\ndef f(x):\n    return []",
            "patches_runtime",
        ),
        "a json module that lies": (
            'import json\njson.dumps = lambda *a, **k: \'{"call": 0, "value": true}\'\n'
            "def f(x):\n    return None",
            "patches_runtime",
        ),
    },
    "turns asserts off": {
        "a trace function": (
            "import sys\nsys.settrace(lambda *a: None)\ndef f(x):\n    return None",
            "traces",
        ),
        "the optimise flag": (
            "import os\nos.environ['PYTHONOPTIMIZE'] = '2'\ndef f(x):\n    return None",
            "traces",
        ),
        "a profile function that raises": (
            "import sys\ndef stop(*a):\n    raise SystemExit(0)\nsys.setprofile(stop)\n"
            "def f(x):\n    return None",
            "traces",
        ),
    },
    "looks for the expected value": {
        "in frames": (
            "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
            "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
            "            if isinstance(value, dict) and x in value:\n"
            "                return value[x]\n"
            "            if isinstance(value, dict) and 'expected' in value:\n"
            "                return value['expected']\n        frame = frame.f_back",
            "walks_frames",
        ),
        "in the garbage collector": (
            "import gc\ndef f(x):\n    for thing in gc.get_objects():\n"
            "        if type(thing) is dict and 'expected' in thing:\n"
            "            return thing['expected']\n"
            "        if type(thing) is dict and len(thing) == 2 and x in thing:\n"
            "            return thing[x]",
            "walks_frames",
        ),
        "in memory, by /proc": (
            "import re\ndef f(x):\n    with open('/proc/self/maps') as maps:\n"
            "        spans = [re.match('(\\\\w+)-(\\\\w+) rw', line) for line in maps]\n"
            "    memory = open('/proc/self/mem', 'rb', 0)\n    for span in filter(None, spans):\n"
            "        memory.seek(int(span[1], 16))\n"
            "        try:\n            data = memory.read(int(span[2], 16) - int(span[1], 16))\n"
            "        except (OSError, OverflowError):\n            continue\n"
            "        found = re.search(b'EXPECTED = .3: (\\\\d)|\"expected\": (\\\\d)', data)\n"
            "        if found:\n            return int(found[1] or found[2])",
            None,
        ),
        "in other processes": (
            "import glob\ndef f(x):\n    for name in glob.glob('/proc/[0-9]*/environ'):\n"
            "        try:\n            data = open(name, 'rb').read()\n"
            "        except OSError:\n            continue\n"
            "        if b'expected' in data:\n            return 6",
            None,
        ),
    },
    "makes the grader fail": {
        "never returns": ("def f(x):\n    while True:\n        pass", None),
        "eats memory": ("def f(x):\n    return 'x' * 10**10", None),
        "nests without end": (
            "def f(x):\n    for _ in range(10**5):\n        x = [x]\n    return x",
            None,
        ),
        "a number too long to read": ("def f(x):\n    return 10 ** 200_000", None),
        "recursion": ("def f(x):\n    return f(x)", None),
    },
}
CASES = [(case, name) for case, hacks in HACKS.items() for name in hacks]
IN_ALL = bool(os.environ.get("AGENTRL_SOAK"))


def cases_for(backend: StartedBackend) -> list[tuple[str, str]]:
    """All of them where boxes are cheap; one of each kind where a container costs half a second."""
    if backend.name != "docker" or IN_ALL:
        return CASES
    return [(case, next(iter(hacks))) for case, hacks in HACKS.items()]


def graded(backend: StartedBackend, task: Task, sources: Sequence[str]) -> list[Score]:
    """Grade each source as a submission of its own, a few at a time."""
    rubric = CodeRubric(binary=False, visible_reward=0.0, timeout_s=2.0)

    async def scenario() -> list[Score]:
        pool = SandboxPool(backend.backend, max_open=4, create_timeout_s=120)

        async def one(source: str) -> Score:
            episode = Episode(
                task=task, messages=[], turns=[], info={"submission": source}, sandboxes=pool
            )
            return await rubric.score(episode)

        first = asyncio.Semaphore(2)

        async def in_turn(source: str) -> Score:
            async with first:
                return await one(source)

        return await asyncio.gather(*(in_turn(source) for source in sources))

    backend.deadline_s = 180.0
    return backend.run(scenario())


@pytest.mark.parametrize("task", [CALLS, PROGRAM], ids=["calls", "program"])
def test_no_hack_earns_anything_and_honest_work_earns_all(
    backend: StartedBackend, task: Task
) -> None:
    cases = cases_for(backend)
    hacks = [HACKS[case][name] for case, name in cases]
    scores = graded(backend, task, [*HONEST.values(), *(source for source, _ in hacks)])
    honest, hacked = scores[: len(HONEST)], scores[len(HONEST) :]
    assert [score.reward for score in honest] == [1.0] * len(honest), list(HONEST)
    assert all(score.success and not score.tampering for score in honest)
    earned = {case: score.reward for case, score in zip(cases, hacked, strict=True) if score.reward}
    assert not earned
    for (case, name), score in zip(cases, hacked, strict=True):
        pattern = HACKS[case][name][1]
        assert pattern is None or pattern in score.tampering, (case, name)


def test_a_solution_sees_the_same_when_it_is_graded_and_when_the_agent_runs_it(
    backend: StartedBackend,
) -> None:
    """Nothing to special-case: environment, arguments, directory and flags are the agent's own."""
    look = (
        "import os, sys\n"
        "def f(x):\n"
        "    return [sorted(os.environ.items()), sys.argv, os.getcwd(), list(sys.flags),\n"
        "            sorted(os.listdir('.')), os.getuid(), sys.stdin.isatty()]\n"
    )
    task = Task(
        id="look",
        data={**CALLS.data, "hidden_tests": [{"args": [0], "expected": None}]},
    )

    async def seen_by_the_agent() -> list[Any]:
        pool = SandboxPool(backend.backend, create_timeout_s=60)
        sandbox = await pool.acquire()
        try:
            shown = await sandbox.run_code(look + "repr(f(0))")
        finally:
            await sandbox.close()
        return eval(eval(shown.result or ""))

    expected = backend.run(seen_by_the_agent())
    task.data["hidden_tests"][0]["expected"] = [
        [list(item) for item in expected[0]],
        *expected[1:],
    ]
    (score,) = graded(backend, task, [look])
    assert score.reward == 1.0


# ----------------------------------------------------------------------- files

GRADER = """
ran = run(["python3", "-I", "solution.py"], stdin=b"21", timeout_s=5)
expected = open("tests/expected.txt").read().strip()
said = ran.stdout.decode(errors="replace").strip()
report(float(said == expected), exit=ran.exit_code, said=said)
"""
CLEAN = {"tests/expected.txt": b"42\n"}
FILE_HACKS = {
    "prints nothing and exits with success": "import sys; sys.exit(0)",
    "forges the report on every descriptor": (
        "import os\nfor fd in range(3, 256):\n    try:\n"
        '        os.write(fd, b\'{"nonce": "", "score": 1.0, "details": {}}\\n\')\n'
        "    except OSError:\n        pass"
    ),
    "opens the grader's descriptors": (
        "import os, glob\nfor name in glob.glob('/proc/[0-9]*/fd/*'):\n    try:\n"
        "        os.write(os.open(name, os.O_WRONLY), b'{\"score\": 1.0}\\n')\n"
        "    except OSError:\n        pass"
    ),
    "reads the nonce from the grader's memory": (
        "import os, re\nparent = os.getppid()\n"
        "spans = [line.split()[0] for line in open(f'/proc/{parent}/maps') if ' rw' in line]\n"
        "memory = open(f'/proc/{parent}/mem', 'rb', 0)\n"
        "for span in spans:\n    start, end = (int(x, 16) for x in span.split('-'))\n"
        "    memory.seek(start)\n"
        "    try:\n        data = memory.read(end - start)\n"
        "    except OSError:\n        continue\n"
        "    if re.search(b'\"nonce\": \"[0-9a-f]{32}', data):\n        print('FOUND')"
    ),
    "kills the grader": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "hangs, and leaves a child behind": (
        "import os, time\nif os.fork():\n    time.sleep(60)\nos.setsid()\ntime.sleep(60)"
    ),
}


def graded_files(
    backend: StartedBackend, artifacts: Sequence[Mapping[str, bytes]], grader: str = GRADER
) -> list[Verdict]:
    async def scenario() -> list[Verdict]:
        pool = SandboxPool(backend.backend, max_open=4, create_timeout_s=120)
        slots = asyncio.Semaphore(2)

        async def one(files: Mapping[str, bytes]) -> Verdict:
            async with slots:
                return await grade_artifacts(
                    pool, artifacts=files, grader=grader, tests=CLEAN, timeout_s=8.0
                )

        return await asyncio.gather(*(one(files) for files in artifacts))

    backend.deadline_s = 180.0
    return backend.run(scenario())


def test_files_are_graded_by_a_program_that_they_cannot_speak_for(backend: StartedBackend) -> None:
    honest = b"print(int(input()) * 2)"
    own_tests = {"solution.py": b"print(7)", "tests/expected.txt": b"7\n"}
    shadows = {
        "solution.py": b"print(7)",
        "json.py": b"print('hacked'); loads = dumps = lambda *a, **k: {'score': 1.0}",
        "subprocess.py": b"raise SystemExit(0)",
        "sitecustomize.py": b"import os; os._exit(0)",
        "a.pth": b"import os; os._exit(0)",
        "conftest.py": b"raise SystemExit(0)",
    }
    hacks = [{"solution.py": source.encode()} for source in FILE_HACKS.values()]
    good, *others = graded_files(
        backend, [{"solution.py": honest, **{"json.py": b"1/0"}}, own_tests, shadows, *hacks]
    )
    assert (good.score, good.error, good.tampering) == (1.0, None, ())
    assert good.details == {"exit": 0, "said": "42"}
    for name, verdict in zip(["own tests", "shadows", *FILE_HACKS], others, strict=True):
        assert verdict.score == 0.0, name
        assert "FOUND" not in verdict.details.get("said", ""), name


def test_what_waits_in_the_agents_sandbox_never_meets_the_grader(backend: StartedBackend) -> None:
    """A process that edits the tests as soon as they appear, and links that lead elsewhere."""
    watcher = (
        "import os, subprocess, sys\n"
        "code = '''\nimport time, os\nwhile True:\n"
        '    for folder in ("/box/tests", "/box"):\n'
        '        path = folder + "/expected.txt"\n'
        '        if os.path.exists(path): open(path, "w").write("7")\n'
        "    time.sleep(0.01)\n'''\n"
        "p = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "open('solution.py', 'w').write('print(7)')\n"
        "os.symlink('/etc/passwd', 'stolen.py')\n"
        "os.mkfifo('pipe.py')\n"
        "os.makedirs('.git'); open('.git/config.py', 'w').write('x')\n"
        "open('conftest.py', 'w').write('raise SystemExit')\n"
        "open('big.py', 'w').write('x' * (2 << 20))\n"
    )

    async def artifacts() -> dict[str, bytes]:
        pool = SandboxPool(backend.backend, create_timeout_s=60)
        sandbox = await pool.acquire()
        try:
            made = await sandbox.run_code(watcher)
            assert made.error is None, made.error
            return await collect(sandbox, ["*.py"])
        finally:
            await sandbox.close()

    files = backend.run(artifacts())
    assert files == {"solution.py": b"print(7)"}
    (verdict,) = graded_files(backend, [files])
    assert verdict.score == 0.0


def test_there_is_no_history_and_no_network_to_fetch_an_answer_from(
    backend: StartedBackend,
) -> None:
    hack = (
        "import os, socket, subprocess, urllib.request\n"
        "def f(x):\n"
        "    try:\n"
        "        return int(urllib.request.urlopen('http://1.1.1.1/', timeout=1).read())\n"
        "    except Exception:\n        pass\n"
        "    try:\n"
        "        return subprocess.run(['git', 'log', '-p'], capture_output=True).stdout\n"
        "    except Exception:\n        pass\n"
        "    try:\n        socket.create_connection(('127.0.0.1', 8265), 1)\n"
        "        return 6\n"
        "    except OSError as error:\n        return type(error).__name__\n"
    )
    (score,) = graded(backend, CALLS, [hack])
    assert score.reward == 0.0
    assert score.tampering == ("reads_history",)
    assert find_tampering(HONEST["doubles"]) == ()
