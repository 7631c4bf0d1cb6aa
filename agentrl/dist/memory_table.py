"""A memory plan for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from agentrl.dist.memory import PARTS, DevicePlan, MemoryPlan
from agentrl.dist.memory_fit import gib, refusal
from agentrl.dist.memory_needs import Request


@dataclass(slots=True, frozen=True, kw_only=True)
class Planned:
    """A plan, or why there is none."""

    request: Request | None
    plan: MemoryPlan | None
    why_not: str = ""
    notes: tuple[str, ...] = ()
    """What the plan leaves out."""

    @property
    def refusal(self) -> str | None:
        """What to say where it cannot fit; None where it does, or nothing is known."""
        if self.plan is None or self.request is None or not self.plan.missing:
            return None
        return refusal(self.request, self.plan)


def render(planned: Planned) -> Iterator[Table | str]:
    """Yield what to print: a table for each device, and what was left out."""
    if planned.plan is None:
        yield f"memory: not planned: {planned.why_not}"
        return
    for device in planned.plan.devices:
        yield _table(device)
    for note in planned.notes:
        yield f"memory: {note}"


def as_json(planned: Planned) -> dict[str, Any]:
    """Return a plan as plain data, in bytes."""
    if planned.plan is None:
        return {"planned": False, "why_not": planned.why_not}
    return {
        "planned": True,
        "notes": list(planned.notes),
        "devices": [
            {
                "name": plan.device.name,
                "capacity_bytes": plan.device.capacity,
                "peak_bytes": plan.peak,
                "phases": plan.phases,
                "roles": {role.role: _columns(plan, role.role) for role in plan.roles},
            }
            for plan in planned.plan.devices
        ],
    }


def _table(plan: DevicePlan) -> Table:
    parts = [part for part in PARTS if any(_columns(plan, r.role).get(part) for r in plan.roles)]
    capacity = plan.device.capacity
    of = "capacity unknown here" if capacity is None else f"of {gib(capacity)}"
    table = Table(
        title=f"memory: {plan.device.name}: {gib(plan.peak)} {of}",
        title_justify="left",
        title_style="bold red" if plan.missing else "bold",
        caption="peak of each phase: "
        + ", ".join(f"{name} {gib(size)}" for name, size in plan.phases.items()),
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("")
    for part in parts:
        table.add_column(part, justify="right")
    for role in plan.roles:
        sizes = _columns(plan, role.role)
        table.add_row(role.role, *(gib(sizes[p]) if sizes.get(p) else "" for p in parts))
    return table


def _columns(plan: DevicePlan, role: str) -> dict[str, int]:
    """Return what a role holds of each part at its own worst."""
    found: dict[str, int] = {}
    for item in (item for item in plan.roles if item.role == role):
        most: Mapping[str, int] = {
            part: max((sizes.get(part, 0) for sizes in item.working.values()), default=0)
            for part in PARTS
        }
        for part in PARTS:
            size = item.standing.get(part, 0) + most[part]
            if size:
                found[part] = found.get(part, 0) + size
    return found
