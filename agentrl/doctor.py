"""Whether this machine can run a configuration: what `agentrl doctor` says."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.cluster import RAY, placement_of
from agentrl.config.load import load
from agentrl.config.schema import Config
from agentrl.dist.machine import gpus, host_memory, num_cores
from agentrl.dist.machine_checks import (
    Check,
    Status,
    check_cores,
    check_disk,
    check_extras,
    check_gpus,
    check_host_memory,
    check_nccl,
    check_open_files,
    check_python,
    check_ray,
    check_shared_memory,
    check_torch,
)
from agentrl.dist.memory import MemoryPlan
from agentrl.dist.memory_needs import Memory
from agentrl.dist.memory_table import Planned
from agentrl.env.registry import env_registry
from agentrl.errors import AgentRLError
from agentrl.memory_plan import plan_run, wants_gpu
from agentrl.train.environments import make_environments, need_sandboxes

DEADLINE_S = 3.0
"""For all checks together: what has not answered by then is reported as late."""
_STATE_BYTES = 12
"""Of a parameter in a checkpoint: its master and two moments."""


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """What was found."""

    checks: list[Check]
    planned: Planned | None
    """None where the configuration itself is refused."""

    @property
    def failed(self) -> bool:
        """Whether something is missing that the configuration needs."""
        return any(check.status is Status.fail for check in self.checks)


def diagnose(overrides: Sequence[str], *, deadline_s: float = DEADLINE_S) -> Diagnosis:
    """Check this machine against a configuration. Starts nothing, and ends in time.

    Args:
        overrides: ``key=value`` settings; a configuration that is refused counts as a failure, and
            the rest is checked against the defaults.
        deadline_s: for everything.
    """
    end = time.monotonic() + deadline_s
    refused: AgentRLError | None = None
    # A machine can be looked at without an environment in mind.
    stand_in = [] if _names_environment(overrides) else [f"env.id={env_registry.names()[0]}"]
    try:
        config = load([*stand_in, *overrides])
    except AgentRLError as error:
        refused, config = error, Config()
    jobs: dict[str, Callable[[], Any]] = {
        "configuration": lambda: [_configuration(refused, stand_in)],
        "python": lambda: [check_python()],
        "gpus": lambda: list(_gpu_checks(config)),
        "memory": lambda: plan_run(config),
        "sandbox": lambda: [_check_sandbox(config)],
        "ray": lambda: [check_ray(config.cluster.address)] if _uses_ray(config) else [],
        "limits": lambda: list(_limits(config)),
    }
    found = _in_time(jobs, end)
    planned = found.pop("memory")
    checks = [check for name in found for check in found[name]]
    if isinstance(planned, Planned):
        checks += _plan_checks(config, planned)
    else:
        checks += planned
    return Diagnosis(checks=checks, planned=planned if isinstance(planned, Planned) else None)


def _in_time(jobs: dict[str, Callable[[], Any]], end: float) -> dict[str, Any]:
    """Run every job on a thread of its own; one that is late, or raises, is a check itself.

    Threads that hang are left behind: they are daemons, and end with the process.
    """
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            found[name] = jobs[name]()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found[name] = [Check(name=name, status=Status.fail, found=text)]

    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in jobs}
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(end - time.monotonic(), 0.0))
        if name not in found:
            late = Check(name=name, status=Status.warn, found="did not answer in time")
            found[name] = [late]
    return {name: found[name] for name in jobs}


def _names_environment(overrides: Sequence[str]) -> bool:
    return any(item.lstrip("+").startswith(("env=", "env.id=", "env.mix")) for item in overrides)


def _configuration(refused: AgentRLError | None, stand_in: Sequence[str]) -> Check:
    if refused is None:
        found = f"accepted, with {stand_in[0]} in want of another" if stand_in else "accepted"
        return Check(name="configuration", status=Status.ok, found=found)
    fix = "mend it; what follows is checked against the defaults"
    return Check(name="configuration", status=Status.fail, found=str(refused), fix=fix)


def _uses_ray(config: Config) -> bool:
    return config.cluster.kind == RAY


def _gpu_checks(config: Config) -> Iterator[Check]:
    import torch

    here = gpus()
    yield check_torch(torch.version.cuda, here)
    needed = 0
    if _uses_ray(config) and config.cluster.address is None:
        pools = placement_of(config).pools.values()
        needed = sum(pool.ranks for pool in pools if pool.gpus_per_rank)
    elif not _uses_ray(config) and config.model.device.startswith("cuda"):
        index = config.model.device.partition(":")[2]
        needed = 1 + (int(index) if index.isdigit() else 0)
    yield check_gpus(here, needed=needed)
    if here or (_uses_ray(config) and wants_gpu(config)):
        yield check_nccl(os.environ)


def _limits(config: Config) -> Iterator[Check]:
    workers = config.rollout.workers if _uses_ray(config) else 0
    yield check_cores(num_cores(), processes=1 + workers)
    yield check_shared_memory(uses_ray=_uses_ray(config))
    yield check_open_files(episodes=config.rollout.concurrency)
    yield from check_extras(_needed_extras(config))


def _needed_extras(config: Config) -> dict[str, str]:
    needed: dict[str, str] = {}
    if _uses_ray(config):
        needed["ray"] = "cluster=ray"
    if config.lora.rank:
        needed["peft"] = "lora.rank"
    if config.model.path.endswith(".gguf"):
        needed["gguf"] = "model.path"
    columnar = (".parquet", ".pq")
    for split, source in config.data.sources().items():
        if source.startswith("hf:") or source.endswith(columnar) or Path(source).is_dir():
            needed["data"] = f"data.{split}"
    return needed


def _check_sandbox(config: Config) -> Check:
    from agentrl.sandbox.registry import sandbox_registry

    try:
        needed = need_sandboxes(make_environments(config.env, config.tools))
    except AgentRLError:  # told by the configuration, or when the run starts
        needed = False
    name = f"sandbox {config.sandbox.id}"

    async def start() -> list[str]:
        backend = sandbox_registry.get(config.sandbox.id)(**config.sandbox.kwargs)
        try:
            await backend.start()
            return list(backend.report().warnings)
        finally:
            await backend.close()

    try:
        warnings = asyncio.run(start())
    except (AgentRLError, OSError, TypeError) as error:
        status = Status.fail if needed else Status.warn
        note = "the environment needs it" if needed else "no environment of this run needs it"
        return Check(name=name, status=status, found=f"cannot be used: {error}", fix=note)
    if warnings:
        return Check(name=name, status=Status.warn, found="; ".join(warnings))
    return Check(name=name, status=Status.ok, found="starts")


def _plan_checks(config: Config, planned: Planned) -> Iterator[Check]:
    if planned.plan is None:
        yield Check(name="memory plan", status=Status.warn, found=f"none: {planned.why_not}")
        return
    problem = planned.refusal
    if problem is None:
        yield Check(name="memory plan", status=Status.ok, found="fits")
    else:
        what, _, fix = problem.partition("\n")
        yield Check(name="memory plan", status=Status.fail, found=what, fix=fix)
    yield check_host_memory(host_memory(), needed=_host_peak(planned.plan))
    request = planned.request
    assert request is not None
    trained = [need for need in request.models if need.trained]
    yield check_disk(
        Path(config.trainer.run_dir or "runs"),
        checkpoint_bytes=sum(_checkpoint_bytes(need) for need in trained),
        keep=config.trainer.keep_last,
    )


def _host_peak(plan: MemoryPlan) -> int:
    return max((d.peak for d in plan.devices if d.device.memory is not Memory.gpu), default=0)


def _checkpoint_bytes(need: Any) -> int:
    return _STATE_BYTES * need.num_trained
