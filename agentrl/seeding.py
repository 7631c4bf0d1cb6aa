"""Seeds that depend on what is sampled, never on when it was."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: str | int) -> int:
    """Hash ``parts`` into a 63-bit seed.

    The seed of a trajectory is ``derive_seed(run_seed, epoch, task_id, sample, attempt)``, that of
    a turn ``derive_seed(trajectory_seed, turn)``: independent of arrival order and of the process.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(f"{type(part).__name__}:{part}\x00".encode())
    return int.from_bytes(digest.digest(), "big") >> 1
