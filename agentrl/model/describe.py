"""The configuration of a model, read without its weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from agentrl.errors import ModelError
from agentrl.extras import missing_extra
from agentrl.model import load


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
            return AutoConfig.from_pretrained(path, local_files_only=not load.hub_answers())
    except Exception as error:  # whatever readers raise at files that are not what they seem
        if isinstance(error, ModelError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ModelError(
            f"cannot read the configuration of the model {path!r} ({type(error).__name__}: "
            f"{reason}); give a directory with a config.json, a .gguf file or a hub id"
        ) from error


def _of_gguf(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"no such file: {str(path)!r}; model.path names a .gguf file to read")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(missing_extra("gguf", f"reading {path.name!r}"))
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
