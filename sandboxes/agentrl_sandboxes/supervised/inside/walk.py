"""Opening a path beneath a directory, also where the kernel cannot do so in one step."""

from __future__ import annotations

import errno
import os

from . import kernel

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_beneath(directory_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path that must stay beneath a directory, whatever links lie on the way."""
    try:
        return kernel.open_beneath(directory_fd, path, flags, mode)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    return walk_beneath(directory_fd, path, flags, mode)


def walk_beneath(directory_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """The same step by step, for kernels without `openat2` (gVisor); it follows no link at all."""
    if "\0" in path:
        raise ValueError("a path cannot hold a NUL byte")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    if path.endswith("/"):
        parts.append(".")
    here = os.dup(directory_fd)
    try:
        for part in parts[:-1]:
            above, here = here, os.open(part, _FOLDER, dir_fd=here)
            os.close(above)
        last = parts[-1] if parts else "."
        return os.open(last, flags | os.O_NOFOLLOW, mode, dir_fd=here)
    finally:
        os.close(here)
