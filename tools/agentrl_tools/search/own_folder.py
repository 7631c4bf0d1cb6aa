"""A temporary folder that goes with its process, however that ends.

A process that is killed leaves its folder; the next one that makes one removes it. Who lives holds
a lock on theirs, which the kernel takes away with the process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "agentrl-search-index-"
_held: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends in order."""


def own_folder() -> Path:
    """Return a new folder, after the removal of those whose processes are gone.

    Raises:
        OSError: none can be made.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_left(folder)
    while True:
        made = tempfile.TemporaryDirectory(prefix=_PREFIX)
        fcntl.flock(os.open(made.name, os.O_RDONLY), fcntl.LOCK_EX)
        if Path(made.name).is_dir():  # else it was taken for one that was left, before the lock
            _held.append(made)
            return Path(made.name)


def _remove_if_left(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone by now, or somebody else's
        return
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its process lives
        return
    finally:
        os.close(fd)
