"""Which code made a checkpoint."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import agentrl

_LIBRARIES = ("agentrl", "torch", "transformers", "numpy")
CODE = "agentrl_code"
"""Key of the digest of agentrl's own sources: a checkout changes without a new version."""


@cache
def provenance() -> dict[str, str]:
    """Return versions, by package, of what decides numbers, and a digest of agentrl's code."""
    found = {}
    for package in _LIBRARIES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that was never installed
            found[package] = "unknown"
    return found | {CODE: _code_digest()}


def _code_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    root = Path(agentrl.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\x00".encode() + path.read_bytes())
    return digest.hexdigest()
