"""Who owns a container, and which containers nobody owns any more.

A container's labels name its owner such that a later process can tell whether that one still lives,
also where the owner was killed and could not clean up: by process id and start time, within one
boot of one machine and one pid namespace. Where the owner cannot be seen from here, its time to
live decides.
"""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_sandboxes.supervised.owner import start_time

if TYPE_CHECKING:
    from docker import APIClient

MARK = "agentrl.sandbox"
_PREFIX = "agentrl."
_NOT_RUNNING_S = 60.0
"""How long a container that does not run may be there: being started, or being looked into."""
_PAST_TTL_S = 10.0


@dataclass(slots=True, kw_only=True, frozen=True)
class Owner:
    """One process, as nothing else will ever be called."""

    pid: int
    start_ticks: int
    """Its start time, in clock ticks since boot."""
    boot: str
    pid_namespace: str

    def alive(self, seen_by: Owner) -> bool | None:
        """Whether it lives; None where `seen_by` cannot tell."""
        if (self.boot, self.pid_namespace) != (seen_by.boot, seen_by.pid_namespace):
            return None
        return start_time(self.pid) == self.start_ticks


def this_process() -> Owner:
    """The owner that we are."""
    own_start = start_time(os.getpid())
    assert own_start is not None  # we live
    return Owner(
        pid=os.getpid(),
        start_ticks=own_start,
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.readlink("/proc/self/ns/pid"),
    )


def labels(owner: Owner, run_id: str, ttl_s: float) -> dict[str, str]:
    """The labels of a container that this owner creates now."""
    return {
        MARK: "1",
        f"{_PREFIX}run": run_id,
        f"{_PREFIX}owner.pid": str(owner.pid),
        f"{_PREFIX}owner.start": str(owner.start_ticks),
        f"{_PREFIX}owner.boot": owner.boot,
        f"{_PREFIX}owner.pid_namespace": owner.pid_namespace,
        f"{_PREFIX}expires_at": f"{time.time() + ttl_s:.0f}",
    }


def is_orphan(
    found: dict[str, str], *, running: bool, age_s: float, me: Owner, now_s: float
) -> bool:
    """Whether a container of ours is nobody's.

    Args:
        found: its labels; one that lacks any was not made by this version, and is left to its age.
        running: whether it runs. age_s: seconds since it was created.
    """
    try:
        owner = Owner(
            pid=int(found[f"{_PREFIX}owner.pid"]),
            start_ticks=int(found[f"{_PREFIX}owner.start"]),
            boot=found[f"{_PREFIX}owner.boot"],
            pid_namespace=found[f"{_PREFIX}owner.pid_namespace"],
        )
        expires_at_s = float(found[f"{_PREFIX}expires_at"])
    except (KeyError, ValueError):
        return not running and age_s > _NOT_RUNNING_S
    alive = owner.alive(me)
    if alive is False or now_s > expires_at_s + _PAST_TTL_S:
        return True
    return alive is None and not running and age_s > _NOT_RUNNING_S


def find_orphans(client: APIClient, me: Owner) -> list[str]:
    """The ids of all containers that nobody owns."""
    listed: list[dict[str, Any]] = client.containers(all=True, filters={"label": f"{MARK}=1"})
    now_s = time.time()
    return [
        entry["Id"]
        for entry in listed
        if is_orphan(
            entry.get("Labels") or {},
            running=entry.get("State") == "running",
            age_s=now_s - float(entry.get("Created", 0)),
            me=me,
            now_s=now_s,
        )
    ]


def remove(client: APIClient, name: str) -> None:
    """Kill and remove a container; one that is gone, or going, is done.

    Raises:
        docker.errors.APIError: the engine will not.
    """
    import docker.errors

    try:
        client.remove_container(name, force=True, v=True)
    except docker.errors.NotFound:
        pass
    except docker.errors.APIError as error:
        if error.status_code != 409:  # "removal is already in progress"
            raise


def was_killed_through(client: APIClient, name: str, started_at: str) -> bool:
    """Whether somebody killed or stopped a container by way of the engine."""
    since = datetime.datetime.fromisoformat(started_at[:19] + "+00:00").timestamp()
    now: Any = f"{time.time() + 0.05:.3f}"  # a later moment would be waited for
    events = client.events(
        since=int(since),
        until=now,
        filters={"container": name, "event": "kill"},
        decode=True,
    )
    return any(True for _ in events)
