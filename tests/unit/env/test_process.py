from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from misbehaving import GradedAsync

from agentrl.env.base import Episode
from agentrl.env.config import EnvConfig
from agentrl.env.frames import frame
from agentrl.env.host import EnvHosts
from agentrl.errors import EnvError, EnvTimeout, InfrastructureError, RewardError
from agentrl.types import Action, Task

FILE = Path(__file__).with_name("misbehaving.py")
TASK = Task(id="t1", data={})


def act(text: str) -> Action:
    return Action(text=text, content=text)


def hosts_of(name: str, **config: Any) -> EnvHosts:
    config.setdefault("process", True)
    return EnvHosts(EnvConfig(id=f"{FILE}:{name}", **config), reward_timeout_s=2.0)


def episode(**info: Any) -> Episode:
    return Episode(task=TASK, messages=[], turns=[], info=info, sandboxes=None)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_dead(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_many_environments_share_few_processes() -> None:
    async def run() -> None:
        hosts = hosts_of("Obedient", processes=2)
        envs = [await hosts.open() for _ in range(5)]
        for env in envs:
            await env.reset(seed=1, options={"task": TASK})
        answers = await asyncio.gather(*(env.step(act("say hi")) for env in envs))
        assert {observation for observation, *_ in answers} == {"hi done"}
        pids = {info["pid"] for *_, info in answers}
        assert len(pids) == 2 and os.getpid() not in pids
        for env in envs:
            await env.close()
        await hosts.close()
        assert not any(map(is_alive, pids))

    asyncio.run(run())


def test_a_hang_that_holds_the_interpreter_lock_is_ended() -> None:
    async def run() -> None:
        hosts = hosts_of("Obedient", processes=1, step_timeout_s=0.3)
        env, neighbour = await hosts.open(), await hosts.open()
        *_, info = await env.step(act("spawn"))
        outcomes = await asyncio.gather(
            env.step(act("hold_the_lock")), neighbour.step(act("go")), return_exceptions=True
        )
        assert isinstance(outcomes[0], EnvTimeout)
        assert isinstance(outcomes[1], InfrastructureError)
        assert wait_until_dead(info["pid"])
        assert wait_until_dead(info["child"]), "the process group outlived the deadline"
        again = await hosts.open()
        assert (await again.step(act("say on")))[0] == "on done"
        assert hosts.stats.num_lost_processes == hosts.stats.num_timeouts == 1
        await hosts.close()

    asyncio.run(run())


@pytest.mark.parametrize(("command", "reason"), [("die 3", "exit code 3")])
def test_a_process_that_dies_blames_the_call_it_was_running(command: str, reason: str) -> None:
    async def run() -> None:
        hosts = hosts_of("Obedient", processes=1)
        env, neighbour = await hosts.open(), await hosts.open()
        outcomes = await asyncio.gather(
            env.step(act(command)), neighbour.step(act("go")), return_exceptions=True
        )
        assert isinstance(outcomes[0], EnvError) and reason in str(outcomes[0])
        assert isinstance(outcomes[1], InfrastructureError)
        await hosts.close()

    asyncio.run(run())


def test_a_killed_process_is_replaced() -> None:
    async def run() -> None:
        hosts = hosts_of("Obedient", processes=1)
        env = await hosts.open()
        *_, info = await env.step(act("go"))
        os.kill(info["pid"], signal.SIGKILL)
        with pytest.raises((EnvError, InfrastructureError)):
            await env.step(act("go"))
        again = await hosts.open()
        assert (await again.step(act("say on")))[0] == "on done"
        await hosts.close()

    asyncio.run(run())


def test_errors_and_answers_that_cannot_be_pickled_have_a_name() -> None:
    async def run() -> None:
        hosts = hosts_of("Obedient")
        env = await hosts.open()
        with pytest.raises(EnvError, match="raised ValueError: x < 3"):
            await env.step(act("raise x < 3"))
        with pytest.raises(EnvError, match="cannot be pickled"):
            await env.step(act("unpicklable"))
        with pytest.raises(EnvError, match="cannot be sent"):
            await env.step(Action(text="go", content="", tool_calls=(lambda: None,)))  # type: ignore[arg-type]
        assert (await env.step(act("say on")))[0] == "on done"
        await hosts.close()

    asyncio.run(run())


def test_large_frames_go_both_ways() -> None:
    async def run() -> None:
        hosts = hosts_of("Obedient")
        env = await hosts.open()
        text = "say " + "x" * 5_000_000
        observation, *_ = await env.step(act(text))
        assert len(observation) == 5_000_000 + len(" done")
        await hosts.close()

    asyncio.run(run())


def test_sync_rubrics_run_in_the_child_and_async_ones_in_the_parent() -> None:
    async def run() -> None:
        for name, in_parent in (("GradedSync", False), ("GradedAsync", True)):
            hosts = hosts_of(name)
            env = await hosts.open()
            assert env.rubric is not None
            score = await env.rubric.score(episode())
            assert (score.parts["pid"] == os.getpid() / 1e7) is in_parent
            await hosts.close()

    asyncio.run(run())


def test_a_sync_rubric_in_a_process_that_wants_a_sandbox_is_told_how() -> None:
    async def run() -> None:
        hosts = hosts_of("UsesSandbox")
        env = await hosts.open()
        assert env.rubric is not None
        with pytest.raises((RewardError, EnvError), match="async def score"):
            await env.rubric.score(episode())
        await hosts.close()

    asyncio.run(run())


def test_file_environments_run_in_a_process_unless_they_say_otherwise(tmp_path: Path) -> None:
    source = tmp_path / "env.py"
    source.write_text("from agentrl.env.base import Env\nclass Mine(Env):\n    pass\n")
    assert EnvHosts(EnvConfig(id=f"{source}:Mine")).in_process
    assert not EnvHosts(EnvConfig(id=f"{source}:Mine", process=False)).in_process
    assert not EnvHosts(EnvConfig(id=f"{FILE}:Obedient")).in_process
    assert EnvHosts(EnvConfig(id=f"{FILE}:Isolated")).in_process
    assert not EnvHosts(EnvConfig(id="agentrl_envs.guess_number:GuessNumber")).in_process
    assert GradedAsync.process is False


_PARENT = """
import asyncio, sys
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.types import Action

async def main():
    hosts = EnvHosts(EnvConfig(id=sys.argv[1], process=True))
    env = await hosts.open()
    *_, info = await env.step(Action(text="go", content=""))
    print(info["pid"], flush=True)
    await env.step(Action(text=sys.argv[2], content=""))

asyncio.run(main())
"""


@pytest.mark.parametrize("command", ["sleep 600", "hold_the_lock"])
def test_the_child_dies_when_the_parent_is_killed(command: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, f"{FILE}:Obedient", command],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until_dead(pid)


def test_a_child_whose_parent_hangs_up_before_the_answer_ends_without_a_traceback() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        call = frame(pickle.dumps(("close", 0, ())))
        ours.sendall(call * 3)
        ours.close()
        code = (
            "import sys; from agentrl.env.child import main; "
            "main(int(sys.argv[1]), int(sys.argv[2]))"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (0, "")
