"""Which container is nobody's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from agentrl_sandboxes.docker import reaper

ME = reaper.this_process()
NOW_S = 1_000_000.0


def found(owner: reaper.Owner, *, expires_in_s: float = 3600.0) -> dict[str, str]:
    labels = reaper.labels(owner, "run", ttl_s=0)
    return {**labels, "agentrl.expires_at": str(NOW_S + expires_in_s)}


@pytest.mark.parametrize(
    ("owner", "expires_in_s", "running", "age_s", "orphan"),
    [
        (ME, 3600, True, 5, False),
        (ME, 3600, False, 500, False),  # its owner may be looking into its death
        (ME, -3600, True, 5, True),
        (ME, -5, True, 5, False),  # it is about to end by itself
        (replace(ME, start_ticks=1), 3600, True, 5, True),  # the process id was given away again
        (replace(ME, pid=2**22 + 1), 3600, True, 5, True),
        (replace(ME, boot="other"), 3600, True, 5000, False),  # another machine, or this one before
        (replace(ME, boot="other"), 3600, False, 5000, True),
        (replace(ME, boot="other"), 3600, False, 5, False),
        (replace(ME, pid_namespace="other"), 3600, True, 5000, False),
        (replace(ME, pid_namespace="other"), -3600, True, 5, True),
    ],
)
def test_an_orphan_is_told_by_its_owner_its_time_and_its_state(
    owner, expires_in_s, running, age_s, orphan
):
    labels = found(owner, expires_in_s=expires_in_s)
    said = reaper.is_orphan(labels, running=running, age_s=age_s, me=ME, now_s=NOW_S)
    assert said is orphan


@pytest.mark.parametrize("broken", ["agentrl.owner.pid", "agentrl.expires_at"])
def test_labels_that_cannot_be_read_leave_a_running_container_alone(broken):
    labels = {**found(replace(ME, start_ticks=1)), broken: "?"}
    assert not reaper.is_orphan(labels, running=True, age_s=9999, me=ME, now_s=NOW_S)
    assert reaper.is_orphan(labels, running=False, age_s=9999, me=ME, now_s=NOW_S)


def test_a_process_that_ended_but_was_not_reaped_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    owner = replace(ME, pid=child.pid, start_ticks=reaper.start_time(child.pid) or 0)
    assert owner.alive(ME) is True
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert owner.alive(ME) is False
    child.wait()
