"""A memory plan for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.dist.memory import PARTS, DevicePlan, MemoryPlan
from agentrl.dist.memory_fit import GIB, refusal
from agentrl.dist.memory_needs import Request

_WIDTH = 80
_LARGE = 8 * GIB
"""A device that needs at least that much is shown in GiB, others in MiB."""


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


def show(planned: Planned, console: Console) -> None:
    """Print a plan: a table for each device, and what was left out."""
    for line in render(planned):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def render(planned: Planned) -> Iterator[Text]:
    """Yield the lines of :func:`show`, none of which ends in blanks."""
    if planned.plan is None:
        yield Text(f"memory: not planned: {planned.why_not}")
        return
    for device in planned.plan.devices:
        yield from _table(device)
    for note in planned.notes:
        yield Text(f"memory: {note}")


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


@dataclass(slots=True, frozen=True)
class _Unit:
    """Of all the figures of one device, so that they can be compared at a glance."""

    name: str
    size: int
    decimals: int

    @classmethod
    def of(cls, plan: DevicePlan) -> _Unit:
        return cls("GiB", GIB, 1) if plan.peak >= _LARGE else cls("MiB", 2**20, 0)

    def figure(self, num_bytes: int) -> str:
        """Format without the unit; what would round to nothing is said to be less than a digit."""
        smallest = 10**-self.decimals
        if 0 < num_bytes / self.size < smallest / 2:
            return f"<{smallest:.{self.decimals}f}"
        return f"{num_bytes / self.size:,.{self.decimals}f}"


def _table(plan: DevicePlan) -> Iterator[Text]:
    """Yield a row for each part and a column for each role: fewer of those, so 80 columns do."""
    unit, capacity = _Unit.of(plan), plan.device.capacity
    of = ", capacity unknown here"
    if capacity is not None:
        of = f" of {unit.figure(capacity)} {unit.name}"
    title = f"memory: {plan.device.name}: {unit.figure(plan.peak)} {unit.name}{of}"
    yield Text(title, style="bold red" if plan.missing else "bold")
    sizes = {role.role: _columns(plan, role.role) for role in plan.roles}
    parts = [part for part in PARTS if any(found.get(part) for found in sizes.values())]
    rows = [[f"  {unit.name}", *sizes]]
    for part in parts:
        held = [found.get(part, 0) for found in sizes.values()]
        rows.append([f"  {part}", *(unit.figure(size) if size else "" for size in held)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        line = name.ljust(widths[0])
        line += "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths[1:], strict=True))
        yield Text(line.rstrip())
    phases = [f"{name} {unit.figure(size)}" for name, size in plan.phases.items()]
    if len(phases) > 1:
        yield from _wrapped(f"  peak of each phase, {unit.name}: ", phases)


def _wrapped(start: str, items: Sequence[str]) -> Iterator[Text]:
    """Break between items alone."""
    kept = ", ".join(item.replace(" ", "\xa0") for item in items)
    for line in textwrap.wrap(start + kept, _WIDTH, subsequent_indent="    "):
        yield Text(line.replace("\xa0", " "))


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
