"""The global random generators of Python and numpy. (The training engine keeps torch's.)"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from agentrl.errors import CheckpointError
from agentrl.seeding import derive_seed


def seed_rng(seed: int) -> None:
    """Start every global generator from the run's seed, whatever was done in the process before.

    Nothing of agentrl draws from them; an environment or a model of the user's may.
    """
    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))


def capture_rng() -> dict[str, Any]:
    """Return the state of both generators as JSON values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(words), gauss],
        "numpy": numpy_state
        | {"state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Undo :func:`capture_rng`.

    Raises:
        CheckpointError: it did not return this.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        numpy_state = dict(state["numpy"])
        key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
        numpy_state["state"] = {**numpy_state["state"], "key": key}
        np.random.set_state(numpy_state)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint's random generators cannot be restored ({type(error).__name__}: "
            f"{error}): it is damaged, or of another version of agentrl; resume from another one"
        ) from error
