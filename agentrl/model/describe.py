"""The configuration of a model, read without its weights."""

from __future__ import annotations

import copy
import importlib.util
import threading
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from agentrl.errors import ModelError
from agentrl.extras import missing_extra
from agentrl.model import load

HUB_FIX = (
    "check the name and the network, or download it elsewhere and give its directory; "
    "model.path=tiny needs no download"
)
"""What to do about a model that no hub gives."""
HUB_TIMEOUT_S = 10.0
"""For the one file; the hub's own client would go on trying for half a minute and more."""


def model_config(path: str) -> Any:
    """Return the transformers configuration of a model in files or on a hub.

    Of a directory its ``config.json`` is read, of a ``.gguf`` file the header, of a hub id the one
    file, with a deadline.

    Args:
        path: a hub id, a directory, or a ``.gguf`` file.

    Raises:
        ModelError: nothing there that can be read.
    """
    local = Path(path).expanduser()
    try:
        with load.quiet_transformers():
            if local.suffix == ".gguf":
                return _of_gguf(local)
            if local.is_dir():
                return AutoConfig.from_pretrained(local)
            if local.exists() or local.is_absolute() or path.startswith((".", "~")):
                raise ModelError(f"no such directory: {path!r}; a hub id looks like 'owner/name'")
            return copy.deepcopy(_of_hub(path))
    except Exception as error:  # whatever readers raise at files that are not what they seem
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"cannot read the configuration of the model {path!r} ({_reason(error)}); give a "
            "directory with a config.json, a .gguf file or a hub id"
        ) from error


@cache
def _of_hub(path: str) -> Any:
    """Read what a hub, or its local cache, has; asked once a process."""
    found: list[Any] = []
    failed: list[Exception] = []
    answers = False

    def ask() -> None:
        nonlocal answers
        answers = load.hub_answers()
        read(offline=not answers)

    def read(offline: bool) -> None:
        try:
            found.append(AutoConfig.from_pretrained(path, local_files_only=offline))
        except Exception as error:
            failed.append(error)

    # In a thread: neither the look-up of a name nor the hub's client has a deadline of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    if thread.is_alive():
        read(offline=True)
    if found:
        return found[0]
    why = "the hub cannot be reached and its local cache lacks it"
    if answers and not thread.is_alive():
        why = _reason(failed[0])
    raise ModelError(
        f"no model {path!r}: no directory of that name, and as a hub id: {why}. {HUB_FIX}"
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _of_gguf(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"no such file: {str(path)!r}; model.path names a .gguf file to read")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(missing_extra("gguf", f"reading {path.name!r}"))
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
