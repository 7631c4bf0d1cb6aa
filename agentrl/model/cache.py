"""A place outside the checkout for what can be made again: converted and warmed-up models."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import ModelError

CACHE_VARIABLE = "AGENTRL_CACHE"


def cache_root() -> Path:
    """Return ``$AGENTRL_CACHE``, else ``~/.cache/agentrl``."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "agentrl"


def make_once(target: Path, make: Callable[[Path], object]) -> bool:
    """Fill a directory, complete or not at all, unless it is there.

    Args:
        target: the directory.
        make: fills an empty directory beside it, which is then renamed. Two processes may both
            do the work; the first to finish wins, the other's result is dropped.

    Returns:
        whether it was made now.

    Raises:
        ModelError: the cache cannot be written.
    """
    if target.is_dir():
        return False
    writing = target.parent / f".writing-{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        writing.mkdir(parents=True)
        make(writing)
        try:
            writing.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise ModelError(
            f"cannot write {str(target)!r}: {error}; set {CACHE_VARIABLE} to a directory with "
            "space that can be written"
        ) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return True


def file_sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
