"""The first process of a box, where the kernel lets it have no other one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, socket, sys
from agentrl_sandboxes.supervised.inside import kernel, supervisor, wire

host, channel = socket.socketpair()
limits = {
    "memory_mb": 1 << 20, "disk_mb": 1 << 10, "cpu_s": 30, "max_processes": 1 << 10,
    "output_bytes": 1024,
}
if os.fork() == 0:
    host.close()
    box = supervisor.Supervisor(
        channel, limits=limits, work=sys.argv[1], scratch="/tmp", isolated=False, counts_user=False
    )
    box.prepare()
    fork, refusals = kernel.fork_into, [11]

    def full(namespaces):
        if refusals:
            raise BlockingIOError(refusals.pop(), "Resource temporarily unavailable")
        return fork(namespaces)

    kernel.fork_into = full
    box.serve()
    os._exit(0)
channel.close()
for op, body, more in json.loads(sys.argv[2]):
    request = {"op": op, "timeout_s": 20, "payload_bytes": 0, **more}
    host.sendall(wire.pack(request, body.encode()))
    answer = wire.receive(host, 1 << 20)
    header = None if answer is None else answer[0]
    print(json.dumps(header and [header["verdict"], header["state_lost"]]), flush=True)
"""
CELL = ("cell", "x = 1", {})
EXEC = ("exec", "", {"argv": ["true"]})
PRIVATE = ("private", "reply(b'')", {})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        # The call that needs another process finds none, and everything of the bomb is ended.
        ((CELL, EXEC, CELL), [["done", False], ["pids_limit", True], ["done", False]]),
        # The interpreter that a private program has used up is replaced once it is needed.
        ((PRIVATE, CELL), [["done", False], ["done", False]]),
    ],
)
def test_a_box_that_is_full_of_processes_is_at_a_limit_and_does_not_die(
    asked: tuple, answers: list, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert [json.loads(line) for line in done.stdout.splitlines()] == answers, done.stderr
