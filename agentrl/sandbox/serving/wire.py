"""What client and server of sandboxes say to each other: one JSON object and raw bytes.

A frame is two big-endian 32-bit lengths, a JSON object, and a body, so that a file of 30 MB
travels as it is. Requests and answers of every call on a box are one frame each.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, fields
from typing import Any

from agentrl.errors import ConfigError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus

MEDIA_TYPE = "application/vnd.agentrl.frame"
OPERATIONS = ("run_code", "run_private", "exec", "read", "write")
FORWARDED = "x-agentrl-forwarded"
"""Set by a worker on what it hands to another, which then answers itself."""

_PREFIX = struct.Struct("!II")
_LIMIT_NAMES = tuple(field.name for field in fields(SandboxLimits))
_TOO_MUCH = 2**63
_WHOLE = ("memory_mb", "max_processes", "disk_mb", "output_bytes")


class WireError(ValueError):
    """The other side sent something that is no frame, or not the one expected."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    head = json.dumps(header).encode("ascii")
    return _PREFIX.pack(len(head), len(body)) + head + body


def unpack(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the parts of a frame; raises :class:`WireError` on anything else."""
    if len(raw) < _PREFIX.size:
        raise WireError(f"{len(raw)} bytes are no frame")
    head_bytes, body_bytes = _PREFIX.unpack_from(raw)
    end = _PREFIX.size + head_bytes
    if end + body_bytes != len(raw):
        raise WireError(f"a frame of {end + body_bytes} bytes was announced, {len(raw)} came")
    try:
        header = json.loads(raw[_PREFIX.size : end])
    except (ValueError, RecursionError) as error:
        raise WireError(f"unreadable frame header: {error}") from None
    if not isinstance(header, dict):
        raise WireError("a frame header must be a JSON object")
    return header, bytes(raw[end:])


def pack_result(result: ExecResult) -> bytes:
    """Return the frame of a result; what the host alone reads is its body."""
    header = {
        field.name: getattr(result, field.name)
        for field in fields(ExecResult)
        if field.name != "private"
    }
    return pack(header, result.private)


def unpack_result(raw: bytes) -> ExecResult:
    """Return the result in a frame; raises :class:`WireError` if there is none."""
    header, private = unpack(raw)
    try:
        result = ExecResult(private=private, **header)
        result.status = SandboxStatus(result.status)
    except (TypeError, ValueError) as error:
        raise WireError(f"not a result: {error}") from None
    texts = (result.stdout, result.stderr, result.result or "", result.error or "")
    numbers = (result.truncated_bytes, result.duration_s, result.exit_code or 0)
    if not all(isinstance(text, str) for text in texts):
        raise WireError("a result with an output that is no text")
    if not all(type(n) in (int, float) and -_TOO_MUCH < n < _TOO_MUCH for n in numbers):
        raise WireError("a result with a number that is none")
    return result


def parse_limits(given: Any) -> SandboxLimits:
    """Return the limits that a JSON object names; the others have their defaults.

    Raises:
        ConfigError: not an object, an unknown name, or a value that is no positive number.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"limits must be a JSON object, got {given!r:.200}")
    for name, value in given.items():
        if name not in _LIMIT_NAMES:
            raise ConfigError(f"unknown limit {name!r}; known: {', '.join(_LIMIT_NAMES)}")
        kinds = (int,) if name in _WHOLE else (int, float)
        # Compared, not converted: a whole number can be too large for a float. NaN is refused.
        if type(value) not in kinds or not 0 < value < _TOO_MUCH:
            kind = "whole number" if name in _WHOLE else "number"
            raise ConfigError(
                f"sandbox limit {name} must be a positive {kind} below 2^63, got {value!r:.80}"
            )
    return SandboxLimits(**given)


def clamp(asked: SandboxLimits, maxima: SandboxLimits) -> tuple[SandboxLimits, list[str]]:
    """Return limits that exceed none of the maxima, and a sentence for each that was lowered."""
    given, told = asdict(asked), []
    for name, most in asdict(maxima).items():
        if given[name] > most:
            told.append(f"{name} lowered from {given[name]:g} to this server's maximum of {most:g}")
            given[name] = most
    return SandboxLimits(**given), told
