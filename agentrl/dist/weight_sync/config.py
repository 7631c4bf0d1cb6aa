"""Settings of the way from the training engine to the rollout engines. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

AUTO, OBJECT_STORE = "auto", "object_store"
TRANSPORTS = (AUTO, OBJECT_STORE, "shm", "cuda_ipc", "nccl", "gloo")


@dataclass(slots=True, kw_only=True)
class WeightSyncConfig:
    """How weights travel to the engines that sample."""

    transport: str = AUTO
    """``cuda_ipc``: from every training rank to the rollout workers on its GPU. ``nccl``: from rank
    0 to all GPUs of rollout workers. ``shm``: between processes of one machine, on CPUs. ``gloo``:
    between machines, on CPUs. ``object_store``: through Ray's, which works everywhere and keeps a
    copy on every node. ``auto`` takes the first of cuda_ipc, nccl and shm that fits where ranks and
    workers were placed, else object_store. Between processes of a cluster: with ``cluster=local``
    leave it at auto, which hands tensors over as they are, or by cuda_ipc or shm to engines that
    run in processes of their own."""
    bucket_mb: int = 256
    """MiB of weights that are packed together and travel as one object, wherever engines have
    processes of their own. A tensor that is larger travels alone. All transports but object_store
    hold two buckets on the sending side, and nccl and gloo two on the receiving side."""
    timeout_s: float = 600.0
    """For one sync: gathering and packing, and every worker that waits for its unfinished requests
    and loads."""
