"""What the rollout engine and vLLM's process say to each other, and how. Imports no vLLM.

Frames over one socket pair: eight bytes of length, then a pickled message. A turn costs one message
each way, whatever its length: nothing is sent per token.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LENGTH = struct.Struct("<Q")
"""Bytes of the message that follows."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    """First message to the process: what to serve."""

    model_dir: str
    """Holds a config.json and nothing else."""
    expected: Mapping[str, tuple[int, ...]]
    """Name -> shape of every parameter in ``transformers``, tied ones once."""
    engine_args: Mapping[str, Any]
    """Keyword arguments of vLLM's ``EngineArgs``."""
    cpu_args: Mapping[str, Any]
    """What is written over them on the CPU build."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Ready:
    """Answer to :class:`Setup`."""

    pid: int
    device_type: str
    """``cpu`` or ``cuda``."""
    specs: Sequence[tuple[str, tuple[int, ...], str]]
    """Name, shape and dtype of every tensor that is served."""
    can_sleep: bool
    positional_noise: bool
    """What a token is drawn with depends on its position in the session, so that a turn that goes
    on needs no seed of its own."""
    num_cache_tokens: int
    """That fit into the KV cache; 0 where unknown."""
    shared_files: Sequence[str]
    """Shared memory of the ranks, which stays behind when they are killed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Failed:
    """The process gives up: at the start, or for good."""

    message: str


@dataclass(slots=True, frozen=True)
class Add:
    """A turn to generate."""

    key: int
    prompt: bytes
    """int32"""
    sampling: Mapping[str, Any]
    """Keyword arguments of vLLM's ``SamplingParams`` beyond the ones all requests share."""


@dataclass(slots=True, frozen=True)
class Abort:
    """End requests with what they have; unknown ones are fine."""

    keys: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Call:
    """Run a method of the engine loop between two steps."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    when_idle: bool = False
    """Wait until the core has no request, waiting, running or on its way through a batch."""


@dataclass(slots=True, frozen=True)
class Quit:
    """Stop the engine and exit."""


@dataclass(slots=True, frozen=True)
class Turn:
    """A turn that ended."""

    key: int
    ids: bytes
    """int32"""
    logprobs: bytes
    """float32"""
    reason: str
    """A :class:`~agentrl.types.StopReason`."""
    num_cached_tokens: int


@dataclass(slots=True, frozen=True)
class Refused:
    """A request that could not be served."""

    key: int
    message: str


@dataclass(slots=True, frozen=True)
class Answer:
    """What a :class:`Call` returned or raised."""

    number: int
    value: Any = None
    error: str | None = None


@dataclass(slots=True)
class Link:
    """Blocking end of the connection, for the engine's process."""

    sock: socket.socket
    _buffer: bytearray = field(default_factory=bytearray)

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone.
        """
        self.sock.sendall(frame(message))

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: the other side is gone.
        """
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return pickle.loads(self._read(length))

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError("the other side closed the connection")
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def frame(message: Any) -> bytes:
    """Return the bytes of one message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data
