"""Settings of the rollout engines. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class HFEngineConfig:
    """Settings of :class:`agentrl.rollout.engines.hf.HFEngine`."""

    num_slots: int = 64
    """Requests decoded at once; more wait their turn. Tiny models on a CPU gain nothing above 64:
    the keys and values of more rows fall out of the cache."""
    max_context: int = 1024
    """Most tokens of one session, prompt and answer together."""
    session_cache_mb: int = 512
    """Memory for keys and values of sessions that hold no slot; beyond it the session that was
    used least recently is forgotten, and prefilled again when it comes back."""
    prefill_tokens: int = 512
    """Most tokens of one prefill pass."""
    deterministic: bool = True
    """The result of a request depends on nothing but the request and the weights."""
    num_threads: int | None = None
    """Threads of torch while the engine computes. None takes one for models below five million
    parameters, where two are slower, and else as many as torch has."""
    drain_timeout_s: float = 600.0
    """How long a weight update waits for unfinished requests before it fails."""
    device: str = "auto"
    """``auto`` takes the device that the model is on."""
    dtype: str = "float32"
    """Of weights and cache while sampling; any torch dtype."""
