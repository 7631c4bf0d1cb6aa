"""A connection to Ray: to a cluster that runs, or to one on this machine for as long as needed."""

from __future__ import annotations

import difflib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import ray
from ray.runtime_env import RuntimeEnv

from agentrl.dist.cluster_config import address_problems
from agentrl.dist.placement import NodeResources
from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""For Ray to start, or to answer. A machine that does other work takes a minute."""
_HERE = "local"
_LATE_NODE = "timed out during startup"
_PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"
"""Environment variable of plug-ins, which bring fields of their own."""
_OF_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray itself proposes; silences a warning
    # By default 15: beside one busy process of anyone else a rank got a hundredth of a core, and
    # its start passed every deadline.
    "RAY_worker_niceness": "0",
}
"""Settings of Ray, where the environment has none of its own."""


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
        ConfigError: no cluster at that address, or none that starts, in time; or ``runtime_env``
            is none.
    """
    if ray.is_initialized():
        yield _nodes()
        return
    if problems := list(address_problems("cluster.address", address)):
        raise ConfigError(problems[0])
    _check_runtime_env(runtime_env or {})
    for name, value in _OF_RAY.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {
        "runtime_env": runtime_env,
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    if address is None:
        options |= {
            "address": _HERE,  # never one that happens to run here
            "num_cpus": num_cpus or len(os.sched_getaffinity(0)),
            "num_gpus": num_gpus,
            "object_store_memory": object_store_bytes,
            "include_dashboard": False,
        }
    else:
        options["address"] = address
    connection = _connect(options, timeout_s)
    try:
        yield _nodes()
    finally:
        ray.shutdown()
        connection.end()


def _check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Refuse what Ray would refuse later as a connection that fails, or take no notice of.

    Raises:
        ConfigError: says what of it.
    """
    unknown = sorted(runtime_env.keys() - RuntimeEnv.known_fields)
    if unknown and _PLUGINS not in os.environ:
        close = difflib.get_close_matches(unknown[0], RuntimeEnv.known_fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"cluster.runtime_env.{unknown[0]}: Ray knows no such field{hint}")
    variables = runtime_env.get("env_vars")
    if variables is not None and not isinstance(variables, Mapping):
        raise ConfigError(
            f"cluster.runtime_env.env_vars={variables!r}: write the value of a variable as "
            "cluster.runtime_env.env_vars.NAME=VALUE"
        )
    try:
        RuntimeEnv(**runtime_env)
    except Exception as error:  # what Ray's own checks raise has many types
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"cluster.runtime_env: {said}") from error


class _Connection:
    """``ray.init``, which has no deadline, in a thread of its own.

    The kernel ends what the thread started when it ends. It is a daemon, since a process that gave
    up on Ray must be able to end.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._over = threading.Event()
        self._abandoned = False
        self.connected: Future[None] = Future()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def _run(self) -> None:
        try:
            ray.init(**self._options)
        except BaseException as error:
            self.connected.set_exception(error)
        else:
            self.connected.set_result(None)
            self._over.wait()
            if self._abandoned:
                ray.shutdown()

    def abandon(self) -> None:
        """Have what comes up too late ended at once: nobody would."""
        self._abandoned = True
        self._over.set()

    def end(self) -> None:
        """Let the thread end."""
        self._over.set()


def _connect(options: dict[str, Any], timeout_s: float) -> _Connection:
    """Connect in time, or refuse.

    A node of ours that was late by Ray's own fixed patience of 30 s, which a machine that does
    other work may well exceed, is started again while there is time.

    Raises:
        ConfigError: it failed, or was late.
    """
    where = options["address"]
    if ":" in where:
        _refuse_unreachable(where, timeout_s)
    logging.getLogger("ray").setLevel(logging.ERROR)
    deadline = time.monotonic() + timeout_s
    while True:
        connection = _Connection(options)
        try:
            connection.connected.result(timeout=max(0.0, deadline - time.monotonic()))
            return connection
        except Exception as error:  # Ray raises whatever it meets, bare exceptions of its own too
            if not connection.connected.done():
                connection.abandon()
                raise ConfigError(
                    f"{_called(where)}Ray did not answer within {timeout_s:g} s; "
                    + _what_to_do(where)
                ) from error
            if where == _HERE and _LATE_NODE in str(error) and time.monotonic() < deadline:
                logger.warning("Ray was not up in 30 s on this machine; starting it again")
                continue
            raise ConfigError(_refused(where, error)) from error


def _called(where: str) -> str:
    """Name the address where a user gave one."""
    return "" if where == _HERE else f"cluster.address={where!r}: "


def _refused(where: str, error: Exception) -> str:
    """Return what to say, without Ray's own advice, which is of settings that we do not have."""
    if where == "auto" and isinstance(error, ConnectionError):
        return f"{_called(where)}this machine belongs to no Ray cluster; {_what_to_do(where)}"
    text = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    said = text or type(error).__name__
    return f"{_called(where)}no connection to Ray: {said}; {_what_to_do(where)}"


def _what_to_do(where: str) -> str:
    if where == _HERE:
        return "end what else runs on this machine, or raise the time it has (start_timeout_s)"
    return (
        "look whether its head runs (`ray status`; `ray start --head` starts it) and can be "
        "reached from here, or leave the address out to start Ray on this machine"
    )


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
