"""Memory of a GPU that two processes see: allocated by the driver, shared by a handle.

Not from torch's allocator: with expandable segments, which training uses and engines that sleep
too, its memory has no handle that another process could open.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import EngineError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class DeviceMemory:
    """uint8 memory on a GPU; see :func:`allocate` and :func:`open_shared`."""

    def __init__(self, address: int, size: int, device: torch.device, *, is_own: bool) -> None:
        self._address, self._size, self._device, self._is_own = address, size, device, is_own

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How torch looks at memory that is not its own."""
        return {
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }

    def tensor(self) -> Tensor:
        """Return the memory as uint8 [size]; it must not be used after :meth:`close`."""
        with torch.cuda.device(self._device):
            return torch.as_tensor(self, device=self._device)

    def handle(self) -> bytes:
        """Return what another process opens."""
        handle = _Handle()
        with _context(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        return bytes(handle)

    def close(self) -> None:
        """Free it, or give the mapping back. Idempotent."""
        if self._address:
            address, self._address = self._address, 0
            with _context(self._device):
                torch.cuda.synchronize(self._device)
                name = "cuMemFree_v2" if self._is_own else "cuIpcCloseMemHandle"
                _call(name, ctypes.c_uint64(address))


def allocate(size: int, device: torch.device) -> DeviceMemory:
    """Allocate ``size`` bytes on ``device``.

    Raises:
        EngineError: the driver refused.
    """
    address = ctypes.c_uint64()
    with _context(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return DeviceMemory(address.value, size, device, is_own=True)


def open_shared(handle: bytes, size: int, device: torch.device) -> DeviceMemory:
    """Map the memory of another process on the same GPU.

    Raises:
        EngineError: the driver refused; a process cannot open its own.
    """
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    with _context(device):
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, flags)
    return DeviceMemory(address.value, size, device, is_own=False)


def all_or_none(makers: Iterable[Callable[[], DeviceMemory]]) -> list[DeviceMemory]:
    """Allocate or open one after another; where one fails, those before it are let go.

    Raises:
        EngineError: the driver refused one.
    """
    with ExitStack() as stack:
        made: list[DeviceMemory] = []
        for make in makers:
            made.append(make())
            stack.callback(made[-1].close)
        stack.pop_all()
    return made


def _context(device: torch.device) -> Any:
    """Make the context that torch uses on ``device`` the thread's own."""
    entered = torch.cuda.device(device)
    torch.zeros(1, device=device)  # creates it, and binds it to this thread
    return entered


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    status = getattr(_driver(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown error"
        raise EngineError(
            f"weight_sync.transport=cuda_ipc: the CUDA driver refused {name} with {status} "
            f"({said}); containers must share an IPC namespace and see the same GPU; "
            "weight_sync.transport=object_store needs neither"
        )
