from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from agentrl.dist.watchdog import (
    StackSource,
    ask_stacks,
    innermost_frame,
    late_ranks,
    stack_of_call,
    waits_for_others,
)

pytestmark = pytest.mark.timeout(60)

HANGS = """
import ctypes, sys, threading, time
from agentrl.dist.watchdog import offer_stacks
source = offer_stacks()
def idle():
    time.sleep(600)
threading.Thread(target=idle, daemon=True).start()
def holds_the_lock_for_good():
    print(source.pid, source.fd, flush=True)
    ctypes.PyDLL(None).pause.restype = None   # keeps the interpreter lock while it waits
    while True:
        ctypes.PyDLL(None).pause()
def outer():
    holds_the_lock_for_good()
outer()
"""

COLLECTIVE = """Current thread 0x1 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/job/loss.py", line 12 in reduce
  File "/job/ray_rank.py", line 171 in _invoke
"""
BUSY = """Thread 0x2 (most recent call first):
  File "/lib/torch/nn/modules/linear.py", line 33 in forward
  File "/job/model.py", line 9 in layer
  File "/job/model.py", line 8 in forward
  File "/lib/torch/distributed/fsdp/wrap.py", line 3 in step
"""


@pytest.fixture
def hanging() -> Iterator[StackSource]:
    child = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid, fd = child.stdout.readline().split()
    yield StackSource(int(pid), int(fd))
    child.kill()
    child.wait(timeout=10)
    child.stdout.close()


def test_stacks_of_a_process_that_holds_the_interpreter_lock(hanging: StackSource) -> None:
    for _ in range(2):  # asked again, it answers anew
        found = ask_stacks(hanging, timeout_s=20)
        assert found.count("holds_the_lock_for_good") == 1
        assert "in outer" in found and "in idle" in found


def test_the_thread_of_the_call_is_found_among_others(hanging: StackSource) -> None:
    found = ask_stacks(hanging, timeout_s=20)
    own = stack_of_call(found, "<string>:outer")
    assert "holds_the_lock_for_good" in own and "idle" not in own
    assert innermost_frame(own).startswith("holds_the_lock_for_good (<string>:")
    assert "idle" in stack_of_call(found, "other.py:nothing")  # unknown: everything is shown


def test_a_process_that_is_gone_says_so_instead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=30)
    assert "no stack" in ask_stacks(StackSource(child.pid, 5))


def test_a_rank_in_a_collective_waits_for_the_others() -> None:
    assert waits_for_others(COLLECTIVE)
    assert not waits_for_others(BUSY)  # a hook of sharding, further out, is no collective


@pytest.mark.parametrize(
    ("stacks", "late"),
    [
        ({0: COLLECTIVE, 1: '  File "a.py", line 1 in load', 2: COLLECTIVE}, [1]),
        ({0: COLLECTIVE, 1: COLLECTIVE}, [0, 1]),
        ({3: "no stack: process 5 cannot be asked", 4: COLLECTIVE}, [3]),
    ],
)
def test_late_is_who_is_in_no_collective(stacks: dict[int, str], late: list[int]) -> None:
    assert late_ranks(stacks) == late
