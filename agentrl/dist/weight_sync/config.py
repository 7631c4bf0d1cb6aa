"""Settings of the way from the training engine to the rollout engines. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class WeightSyncConfig:
    """How weights travel to rollout workers on a cluster; within one process nothing is copied."""

    bucket_mb: int = 256
    """MiB of weights that are packed together and travel as one object. A tensor that is larger
    travels alone."""
    timeout_s: float = 600.0
    """For one sync: gathering and packing, and every worker that waits for its unfinished requests
    and loads."""
