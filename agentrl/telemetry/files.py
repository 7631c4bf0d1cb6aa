"""Files that are either complete or absent, whatever kills the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace ``path`` by ``data``: temporary file, fsync, rename, fsync of the folder.

    A reader sees the old content or the new one. Text is written as UTF-8. Parent folders are
    created.

    Raises:
        OSError: the disk is full or the folder is read-only; ``path`` is then unchanged and no
            temporary file is left.
    """
    raw = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


PARTIAL = ".writing"
"""Folder in which another one is being filled, or was when its process was killed."""


@contextlib.contextmanager
def filling(folder: Path, *, last: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder whose files move into ``folder`` at the end.

    Where the block raises, ``folder`` holds what it held before, or is not there.

    Args:
        folder: made where it is not there.
        last: names of the files that make it what it is, which come after all others.
    """
    writing, is_new = folder / PARTIAL, not folder.exists()
    shutil.rmtree(writing, ignore_errors=True)  # of a process that was killed
    writing.mkdir(parents=True)
    try:
        yield writing
        for path in sorted(writing.iterdir(), key=lambda path: path.name in last):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it holds what was asked for
                folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Make renames and deletions inside ``folder`` durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    # The only portable way to read it is to set it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
