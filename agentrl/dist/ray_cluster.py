"""A connection to Ray: to a cluster that runs, or to one on this machine for as long as needed."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray

from agentrl.dist.placement import NodeResources
from agentrl.errors import ConfigError

START_TIMEOUT_S = 180.0
"""For Ray to start, or to answer. A machine that does other work takes a minute."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray itself proposes; silences a warning
}


@contextmanager
def ray_cluster(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_bytes: int | None = None,
    runtime_env: dict[str, Any] | None = None,
    log_to_driver: bool = False,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[list[NodeResources]]:
    """Be connected to Ray; yields the nodes. Ends only what it started.

    Inside a connection that is there already nothing is started, and nothing is ended.

    Args:
        address: ``host:port`` of a cluster's head, or ``auto`` for the one that this machine
            belongs to; None starts one here, without dashboard and usage statistics.
        num_cpus: that a local cluster may hand out; None: the cores that this process may use.
        num_gpus: the same of GPUs; None: those that CUDA shows.
        object_store_bytes: shared memory of a local cluster; None: Ray's choice.
        runtime_env: Ray's description of what processes find on their nodes.
        log_to_driver: print what actors print.
        timeout_s: within which Ray must answer.

    Raises:
        ConfigError: no cluster at that address, or none that starts, in time.
    """
    if ray.is_initialized():
        yield _nodes()
        return
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address={address!r}: Ray Client copies every batch over the network; run on "
            "a node of the cluster (`ray job submit` does) and write cluster.address=auto"
        )
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {
        "runtime_env": runtime_env,
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    if address is None:
        options |= {
            "address": "local",  # never one that happens to run here
            "num_cpus": num_cpus or len(os.sched_getaffinity(0)),
            "num_gpus": num_gpus,
            "object_store_memory": object_store_bytes,
            "include_dashboard": False,
        }
    else:
        options["address"] = address
    # The thread has to outlive the cluster: the kernel ends what it started when it ends.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray") as executor:
        _connect(executor, options, timeout_s)
        try:
            yield _nodes()
        finally:
            ray.shutdown()


def _connect(executor: ThreadPoolExecutor, options: dict[str, Any], timeout_s: float) -> None:
    """Call ``ray.init`` with a deadline, which it has not itself.

    Raises:
        ConfigError: it failed, or was late.
    """
    where = options["address"]
    if ":" in where:
        _refuse_unreachable(where, timeout_s)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        executor.submit(ray.init, **options).result(timeout=timeout_s)
    except TimeoutError as error:
        executor.shutdown(wait=False)
        raise ConfigError(
            f"cluster.address={where!r}: Ray did not answer within {timeout_s:g} s; look whether "
            "its head runs (`ray status`) and can be reached from here"
        ) from error
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"cluster.address={where!r}: no connection to Ray: {error}; start it with "
            "`ray start --head`, correct the address, or leave it out to start one here"
        ) from error


def _refuse_unreachable(address: str, timeout_s: float) -> None:
    """Look whether anyone listens, since Ray ends the whole process where nobody does.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cluster.address={address!r}: nobody listens there ({error}); start Ray with "
            "`ray start --head`, correct the address, or leave it out to start one here"
        ) from error


def _nodes() -> list[NodeResources]:
    return [
        NodeResources(
            name=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
