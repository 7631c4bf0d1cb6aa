"""Optional dependencies of agentrl: what to say to a user who lacks one."""

from __future__ import annotations

import sys


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


def misfit(error: BaseException) -> str | None:
    """Return what to say where ``torchvision`` was built for another torch than the installed one.

    ``transformers`` and vLLM import it where it is there, so that neither can be imported then.

    Args:
        error: of an import; whatever led to it is looked at as well.

    Returns:
        None where the error is another one.
    """
    seen: BaseException | None = error
    while seen is not None:
        if "torchvision::nms" in str(seen):
            return (
                "the installed torchvision was built for another torch, and nothing that imports "
                "it can be used; text models need none of these: "
                f"{sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec "
                f"({type(seen).__name__}: {seen})"
            )
        seen = seen.__cause__ or seen.__context__
    return None
