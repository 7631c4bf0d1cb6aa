"""Same inputs, same bits."""

from __future__ import annotations

import os

import torch
import torch.utils.deterministic as debugging


def require_deterministic_kernels() -> None:
    """Make torch use deterministic kernels in this process, and raise where it has none.

    Results then depend on the inputs, the machine and the number of threads only.
    """
    # Read by cuBLAS when its first handle is made; without it torch refuses matrix products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # A debugging aid that fills every new tensor; our results do not depend on it.
    debugging.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
