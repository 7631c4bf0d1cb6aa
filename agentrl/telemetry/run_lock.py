"""One writer per run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from agentrl.errors import ConfigError

LOCK_FILE = ".lock"
_held: set[str] = set()


class RunLock:
    """An advisory lock that ends with the process, also on ``kill -9``.

    POSIX record locks, not ``flock``: a forked child (a sandbox, a data worker) that outlives the
    run would inherit the latter and keep the run locked. Record locks do not exclude within one
    process, so the paths held by this process are kept beside them.
    """

    def __init__(self, descriptor: int, key: str) -> None:
        self._descriptor: int | None = descriptor
        self._key = key
        self._pid = os.getpid()

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Lock ``folder`` for writing.

        Raises:
            ConfigError: it is locked; the message names the process.
        """
        path = folder / LOCK_FILE
        key = str(path.resolve())
        if key in _held:
            raise ConfigError(
                f"run directory {str(folder)!r} is already open for writing in this process; "
                "close it first or give another directory"
            )
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"run directory {str(folder)!r} is being written by another process ({owner}): "
                f"stop it or give another trainer.run_dir ({error.strerror})"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(key)
        return cls(descriptor, key)

    def release(self) -> None:
        """Unlock. Idempotent; in a forked child it only forgets."""
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        self._descriptor = None
        if os.getpid() == self._pid:
            _held.discard(self._key)
