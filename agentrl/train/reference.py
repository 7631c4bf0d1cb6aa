"""The policy that a run started from, kept to measure the distance from it.

A run that trains adapters needs none of this: its reference is the actor without them (see
:class:`agentrl.dist.lora.WithoutAdapters`), and what they are attached to is kept anyway.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from agentrl.dist.export import save_pretrained
from agentrl.errors import ModelError
from agentrl.model.load import LoadedModel
from agentrl.train.seal import refuse_damaged, seal

REFERENCE_FOLDER = "reference"
"""In a run directory: the model that the run started from."""
_WRITING = f".writing-{REFERENCE_FOLDER}"
_WHAT = "the reference policy of the KL (algo.kl.coef)"


def keep_reference(model: LoadedModel, run: Path, *, resumed: bool) -> Path:
    """Return the folder of the reference: written by a new run, compared by a resumed one.

    Args:
        model: the policy as the run opens it, not sharded yet.

    Raises:
        CheckpointError: a resumed run's is missing or damaged.
        ModelError: it cannot be written.
    """
    folder = run / REFERENCE_FOLDER
    if resumed:
        refuse_damaged(folder, what=_WHAT)
        return folder
    writing = run / _WRITING
    shutil.rmtree(writing, ignore_errors=True)  # of a start that was killed
    try:
        save_pretrained(model.model, model.tokenizer, writing, None)
        seal(writing)
        shutil.rmtree(folder, ignore_errors=True)
        writing.rename(folder)
    except OSError as error:
        raise ModelError(
            f"cannot write {_WHAT} to {str(folder)!r}: {error}; free disk space, or set "
            "algo.kl.coef=0"
        ) from error
    return folder


def discard_reference(run: Path) -> None:
    """Remove what :func:`keep_reference` wrote for a run that never began."""
    for name in (REFERENCE_FOLDER, _WRITING):
        shutil.rmtree(run / name, ignore_errors=True)
