"""Whether this machine can run a configuration: what `agentrl doctor` says."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from agentrl.errors import AgentRLError, ConfigError, ModelError
from agentrl.limits import positions_of_path, within_positions
from agentrl.memory_plan import plan_run, wants_gpu
from agentrl.model.describe import HUB_FIX
from agentrl.rollout.engines.vllm_installed import find_vllm
from agentrl.train.environments import make_environments, need_sandboxes

DEADLINE_S = 5.0
"""For whatever looks beyond this process: a hub, nvidia-smi, a sandbox, a cluster, an environment.
What has not answered by then is reported as late; the plan comes after that and has as long."""
_STATE_BYTES = 12
"""Of a parameter in a checkpoint: its master and two moments."""


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """What was found."""

    checks: list[Check]
    """What a run would stumble over first comes first."""
    planned: Planned | None
    """None where the configuration, or a model of it, cannot be read."""

    @property
    def failed(self) -> bool:
        """Whether something is missing that the configuration needs."""
        return any(check.status is Status.fail for check in self.checks)


@dataclass(slots=True, frozen=True, kw_only=True)
class _Look:
    """One thing to look at, which may take long."""

    work: Callable[[], list[Check]]
    late: Check
    """What to report where it does."""


def diagnose(overrides: Sequence[str], *, deadline_s: float = DEADLINE_S) -> Diagnosis:
    """Check this machine against a configuration. Starts nothing, and ends in time.

    Args:
        overrides: ``key=value`` settings; where they are refused that is a failure, and only the
            machine itself is looked at besides.
        deadline_s: for looking around, and once more for the plan.
    """
    # A machine can be looked at without an environment in mind.
    stand_in = [] if _names_environment(overrides) else [f"env.id={env_registry.names()[0]}"]
    settings = [*stand_in, *overrides]
    try:
        config = load(settings)
    except AgentRLError as error:
        return Diagnosis(checks=[_refused(error), *_of_any_run()], planned=None)
    looks = {
        "environment": _look("environment", lambda: [_check_environment(config)]),
        "model": _Look(work=lambda: [_check_model(config)], late=_late_model(config)),
        "gpus": _look("gpus", lambda: list(_gpu_checks(config))),
        "sandbox": _look(f"sandbox {config.sandbox.id}", lambda: [_check_sandbox(config)]),
        "ray": _look("ray", lambda: _check_cluster(config)),
    }
    found = in_time(looks, deadline_s)
    planned: list[Planned] = []
    refused: AgentRLError | None = None
    if all(check.status is not Status.fail for check in found["model"]):
        try:
            config = within_positions(config, settings, announce=lambda _: None)
            plan = _look("memory plan", lambda: planned.append(plan_run(config)) or [])
            found |= in_time({"memory plan": plan}, deadline_s)
        except AgentRLError as error:
            refused = error
    first = _accepted(stand_in) if refused is None else _refused(refused)
    checks = [first, *found.pop("environment"), *found.pop("model")]
    checks += [check_python(), *(check for some in found.values() for check in some)]
    checks += [*_limits(config), *_plan_checks(config, planned[0] if planned else None)]
    return Diagnosis(checks=checks, planned=planned[0] if planned else None)


def in_time(looks: Mapping[str, _Look], deadline_s: float) -> dict[str, list[Check]]:
    """Look at everything side by side; what is late, or raises, is a check itself.

    Threads that hang are left behind: they are daemons, and end with the process.
    """
    end = time.monotonic() + deadline_s
    found: dict[str, list[Check]] = {}

    def run(name: str, look: _Look) -> None:
        try:
            found[name] = look.work()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found[name] = [Check(name=look.late.name, status=Status.fail, found=text)]

    threads = [
        threading.Thread(target=run, args=item, daemon=True, name=f"doctor {item[0]}")
        for item in looks.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    return {name: found.get(name, [look.late]) for name, look in looks.items()}


def _look(name: str, work: Callable[[], list[Check]]) -> _Look:
    late = Check(name=name, status=Status.warn, found="did not answer in time")
    return _Look(work=work, late=late)


def _names_environment(overrides: Sequence[str]) -> bool:
    return any(item.lstrip("+").startswith(("env=", "env.id=", "env.mix")) for item in overrides)


def _accepted(stand_in: Sequence[str]) -> Check:
    found = f"accepted, with {stand_in[0]} in want of another" if stand_in else "accepted"
    return Check(name="configuration", status=Status.ok, found=found)


def _refused(error: AgentRLError) -> Check:
    return Check(
        name="configuration",
        status=Status.fail,
        found=str(error),
        fix="mend it first: nothing is planned for settings that a run would refuse",
    )


def _check_environment(config: Config) -> Check:
    try:
        made = make_environments(config.env, config.tools)
    except AgentRLError as error:
        return Check(name="environment", status=Status.fail, found=str(error))
    return Check(name="environment", status=Status.ok, found=", ".join(e.name for e in made))


def _check_model(config: Config) -> Check:
    path = config.model.path
    try:
        positions = positions_of_path(path)
    except ModelError as error:
        return Check(name="model", status=Status.fail, found=str(error))
    known = "" if positions is None else f", {positions} positions"
    return Check(name="model", status=Status.ok, found=f"{path}{known}")


def _late_model(config: Config) -> Check:
    path = config.model.path
    return Check(
        name="model",
        status=Status.fail,
        found=f"the configuration of {path!r} could not be read in time: does the hub answer?",
        fix=HUB_FIX,
    )


def _check_cluster(config: Config) -> list[Check]:
    return [check_ray(config.cluster.address)] if _uses_ray(config) else []


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


def _of_any_run() -> Iterator[Check]:
    import torch

    yield check_python()
    yield check_torch(torch.version.cuda, gpus())
    yield check_cores(num_cores(), processes=1)
    yield check_host_memory(host_memory(), needed=0)
    yield from check_extras({})


def _limits(config: Config) -> Iterator[Check]:
    workers = config.rollout.workers if _uses_ray(config) else 0
    yield check_cores(num_cores(), processes=1 + workers)
    yield check_shared_memory(uses_ray=_uses_ray(config))
    yield check_open_files(episodes=config.rollout.concurrency)
    yield from check_extras(_needed_extras(config))
    if config.rollout.engine.id == "vllm":
        yield _check_vllm(config)


def _check_vllm(config: Config) -> Check:
    try:
        found = find_vllm()
    except ConfigError as error:
        # On a cluster of others the nodes have it, and this machine need not.
        elsewhere = _uses_ray(config) and config.cluster.address is not None
        status = Status.warn if elsewhere else Status.fail
        return Check(name="engine vllm", status=status, found=str(error))
    return Check(name="engine vllm", status=Status.ok, found=f"{found.package} {found.version}")


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


def _plan_checks(config: Config, planned: Planned | None) -> Iterator[Check]:
    """Yield what a plan says, and what is there for it; where there is none, what is there."""
    if planned is not None and planned.plan is None:
        yield Check(name="memory plan", status=Status.warn, found=f"none: {planned.why_not}")
    elif planned is not None and (problem := planned.refusal) is not None:
        what, _, fix = problem.partition("\n")
        yield Check(name="memory plan", status=Status.fail, found=what, fix=fix)
    elif planned is not None:
        yield Check(name="memory plan", status=Status.ok, found="fits")
    plan = None if planned is None else planned.plan
    yield check_host_memory(host_memory(), needed=0 if plan is None else _host_peak(plan))
    request = None if planned is None else planned.request
    models = [] if request is None else request.models
    yield check_disk(
        Path(config.trainer.run_dir or "runs"),
        checkpoint_bytes=sum(_STATE_BYTES * need.num_trained for need in models if need.trained),
        keep=config.trainer.keep_last,
    )


def _host_peak(plan: MemoryPlan) -> int:
    return max((d.peak for d in plan.devices if d.device.memory is not Memory.gpu), default=0)
