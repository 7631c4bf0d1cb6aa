"""What of the settings of adapters cannot work, whatever the model. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator

from agentrl.dist.config import LoraConfig
from agentrl.extras import missing_extra

ALL_LINEAR = "all-linear"


def lora_problems(config: LoraConfig) -> Iterator[str]:
    """Say what of ``config`` cannot work, or would be read by nothing."""
    if config.rank == 0:
        for name in ("alpha", "target_modules"):
            if (value := getattr(config, name)) != getattr(LoraConfig(), name):
                yield (
                    f"lora.{name}={value} with lora.rank=0: all weights are trained, so it would "
                    "change nothing; leave it out, or set lora.rank (16 is customary)"
                )
        return
    if config.rank < 0:
        yield f"lora.rank={config.rank}: at least 1 trains adapters, 0 trains all weights"
    if importlib.util.find_spec("peft") is None:
        yield missing_extra("peft", f"lora.rank={config.rank}")
    if not 0 < config.alpha < math.inf:
        yield (
            f"lora.alpha={config.alpha}: must be a finite number above 0; adapters are scaled by "
            "alpha / rank (customary: alpha = 2 * rank)"
        )
    if not config.target_modules:
        yield f"lora.target_modules is empty: write {ALL_LINEAR}, or a regular expression"
    elif config.target_modules != ALL_LINEAR:
        try:
            re.compile(config.target_modules)
        except re.error as error:
            yield (
                f"lora.target_modules={config.target_modules!r} is no regular expression: {error}; "
                r"write e.g. '.*\.(q_proj|v_proj)'"
            )
