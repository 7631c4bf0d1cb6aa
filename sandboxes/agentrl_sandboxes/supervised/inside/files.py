"""Reading and writing files for the host, with paths that the kernel keeps inside the box."""

from __future__ import annotations

import errno
import os
import stat

from . import walk

_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC


class Refused(Exception):
    """The path or the file cannot be used; the message is for the model."""


def read(path: str, work: str, scratch: str, max_bytes: int) -> bytes:
    """Return a regular file's bytes; raises :class:`Refused`."""
    root, relative = _split(path, work, scratch)
    try:
        with _open(root, relative, _READ_FLAGS) as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from None
    if len(data) > max_bytes:
        raise Refused(f"{path!r} is larger than {max_bytes} bytes")
    return data


def write(path: str, data: bytes, work: str, scratch: str) -> None:
    """Write a regular file, making its folders; raises :class:`Refused`.

    Where the disk has no room for it, a file that was there keeps its content, and a new one
    disappears.
    """
    root, relative = _split(path, work, scratch)
    is_new = True
    try:
        _make_parents(root, relative)
        try:
            opened = _open(root, relative, _WRITE_FLAGS | os.O_EXCL)
        except FileExistsError:
            is_new = False
            opened = _open(root, relative, _WRITE_FLAGS)
        with opened as file:
            try:
                _replace_content(file.fileno(), data)
            except OSError:
                if is_new:
                    _remove(root, relative)
                raise
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from None


def _replace_content(fd: int, data: bytes) -> None:
    size_before = os.fstat(fd).st_size
    try:
        if data:
            os.posix_fallocate(fd, 0, len(data))  # all or nothing, before anything is overwritten
    except OSError:
        os.ftruncate(fd, size_before)
        raise
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written : written + (1 << 20)], written)
    os.ftruncate(fd, len(data))


def _split(path: str, work: str, scratch: str) -> tuple[str, str]:
    """Return (root, path beneath it); a relative path lies in the work directory."""
    for root in (work, scratch):
        if path.startswith(root + "/"):
            return root, path[len(root) + 1 :].lstrip("/")
    if not path or path.startswith("/"):
        raise Refused(f"{path!r} is not a file of the work directory")
    return work, path


class _open:
    """Context manager: an unbuffered regular file beneath a root."""

    def __init__(self, root: str, relative: str, flags: int) -> None:
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mode = 0o644 if flags & os.O_CREAT else 0
            self._fd = walk.open_beneath(root_fd, relative, flags, mode)
        finally:
            os.close(root_fd)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "not a regular file")
        self._file = os.fdopen(self._fd, "wb" if flags & os.O_CREAT else "rb")

    def __enter__(self):
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _remove(root: str, relative: str) -> None:
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    folder, name = os.path.split(relative)
    try:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        folder_fd = walk.open_beneath(root_fd, folder or ".", flags)
        try:
            os.unlink(name, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
    finally:
        os.close(root_fd)


def _make_parents(root: str, relative: str) -> None:
    parent = os.path.dirname(relative)
    if not parent:
        return
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        parts = parent.split("/")
        for depth in range(len(parts)):
            above = "/".join(parts[:depth]) or "."
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            above_fd = walk.open_beneath(root_fd, above, flags)
            try:
                if parts[depth] not in ("", ".", ".."):
                    os.mkdir(parts[depth], 0o755, dir_fd=above_fd)
            except FileExistsError:
                pass
            finally:
                os.close(above_fd)
    finally:
        os.close(root_fd)


def _refusal(path: str, error: BaseException) -> Refused:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    if isinstance(error, OSError) and error.errno == errno.EXDEV:
        reason = "it leads out of the work directory"
    return Refused(f"{path!r}: {reason}")
