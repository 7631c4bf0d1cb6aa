"""Optional dependencies of agentrl: what to say to a user who lacks one."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra.

    By path: what stands under the name ``agentrl`` in the public index is another project.
    """
    return f"in a checkout of agentrl: pip install -e '.[{extra}]'"


def missing_extra(extra: str, needed_by: str) -> str:
    """Return what to say where an optional dependency is not installed.

    Args:
        extra: as ``pyproject.toml`` names it.
        needed_by: the setting, file or output that cannot do without.
    """
    return f"{needed_by} needs the extra {extra!r}, which is missing; {how_to_install(extra)}"
