"""Settings of an environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class MixEntry:
    """One of several environments that are trained together."""

    id: str = ""
    """A registered id, ``package.module:Class`` or ``./file.py:Class``."""
    weight: float = 1.0
    """Its share of the prompts is this over the sum of all weights."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor, checked against its signature."""
    name: str | None = None
    """What metrics and trajectories call it; None: ``id``. Entries need names that differ."""
    algo: dict[str, Any] = field(default_factory=dict)
    """Settings of ``algo`` that are others for this environment: ``advantage``,
    ``advantage_kwargs``, ``gamma``, ``lam``, ``reward_weights``."""


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """Which environment, with which arguments, hosted how."""

    id: str = ""
    """A registered id, ``package.module:Class`` or ``./file.py:Class``."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor, checked against its signature."""
    mix: list[MixEntry] = field(default_factory=list)
    """Several environments in place of ``id`` and ``kwargs``: ``[{id: a, weight: 2}, {id: b}]``; an
    entry has ``id``, ``weight``, ``kwargs``, ``name`` and ``algo`` (settings of the algorithm that
    are others for it)."""
    threads: int = 16
    """Threads that synchronous environments share; each environment stays on one."""
    processes: int = 4
    """Child processes that environments share where they run in processes."""
    process: bool | None = None
    """Run environments in processes of their own. None: as the class says."""
    tasks_timeout_s: float = 120.0
    """For ``tasks(split)``, which may read or download a data set."""
    reset_timeout_s: float = 30.0
    """For ``reset`` and the constructor of one episode."""
    step_timeout_s: float = 30.0
    """For one ``step``, ``tool_state``, ``anchor``, ``snapshot`` or ``restore``."""
    close_timeout_s: float = 5.0
    """For ``close`` of one environment."""
    max_leaked_threads: int = 8
    """Threads lost to environments that hang before the run stops."""
