"""Corpora and indexes are complete or absent: half of one would be searched without a word."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield where to write; what lies there at the end takes its place at ``path``.

    Folders above ``path`` are made. Where the block raises, nothing is left.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder / path.name
        (folder / path.name).rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
