"""Settings of where a run lives. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Where the run lives. ``cluster=ray`` is short for ``cluster.kind=ray``."""

    kind: str = "local"
    """``local``: one process. ``ray``: training ranks and rollout workers are processes of Ray's,
    on one machine or many."""
    address: str | None = None
    """``host:port`` of a Ray cluster's head, or ``auto`` for the cluster that this machine belongs
    to; None starts Ray on this machine for as long as the run lasts."""
    gpus: int = 0
    """Training ranks, each on a GPU of its own; ``placement.pools.train`` says it in detail. 0
    trains on CPUs."""
    cpus_per_rollout_worker: float = 1.0
    """CPU cores that Ray reserves for each of ``rollout.workers``."""
    gpus_per_rollout_worker: float | None = None
    """GPUs of each of ``rollout.workers``, 0 for none. None: they share the GPUs of the training
    ranks, and sleep while those train as ``rollout.sleep_level`` says."""
    start_timeout_s: float = 300.0
    """For Ray to answer, and for all processes to open what they hold."""
    max_restarts: int = 10
    """Lost rollout workers that are replaced in a run; the next one ends it."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """What Ray prepares for processes on their nodes, such as ``working_dir`` and ``env_vars``; see
    Ray's page on runtime environments."""


def address_problems(key: str, address: str | None) -> Iterator[str]:
    """Say what is wrong with the form of a cluster's address.

    Args:
        key: of the setting.
        address: ``host:port``, ``auto`` or None.
    """
    if address is None or address == "auto":
        return
    if address.startswith("ray://"):
        yield (
            f"{key}={address!r}: Ray Client copies every batch over the network; run on a node of "
            f"the cluster (`ray job submit` does) and write {key}=auto"
        )
        return
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16
    if not host or "/" in host or not is_port:
        yield (
            f"{key}={address!r}: write host:port of the cluster's head (Ray's own port is 6379), "
            "auto for the cluster that this machine belongs to, or leave it out to start Ray here"
        )
