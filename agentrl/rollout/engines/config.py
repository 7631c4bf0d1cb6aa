"""Settings of the rollout engines. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


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


VLLM_TEMPERATURES = (0.01, 2.0)
"""Lowest and highest that vLLM samples at, besides 0: it raises lower ones to the first without
saying so, and refuses higher ones."""


@dataclass(slots=True, kw_only=True)
class VLLMEngineConfig:
    """Settings of :class:`agentrl.rollout.engines.vllm.VLLMEngine`."""

    max_context: int = 1024
    """Most tokens of one session, prompt and answer together."""
    max_num_seqs: int = 256
    """Requests decoded at once; more wait their turn."""
    max_batched_tokens: int | None = None
    """Most tokens of one step, prefill and decode together. None leaves it to vLLM."""
    gpu_memory_fraction: float = 0.4
    """Of a GPU's memory that this engine takes: weights, KV cache and workspaces."""
    cpu_cache_mb: int = 512
    """MiB of KV cache of the CPU build, which has no fraction to go by."""
    block_size: int | None = None
    """Tokens of a block of the KV cache: prefixes are shared in whole blocks. None takes 16 on a
    GPU and 32 on a CPU, whose build wants multiples of 32."""
    dtype: str | None = None
    """Of weights and cache while sampling; any torch dtype. None takes ``float32`` in deterministic
    mode and ``bfloat16`` else."""
    tensor_parallel: int = 1
    """GPUs that the model is split over."""
    enforce_eager: bool | None = None
    """Launch every kernel by itself instead of replaying CUDA graphs of decoding steps. None: on a
    CPU only."""
    torch_compile: bool = False
    """Let vLLM compile the model too: a start that is one or two minutes longer, for nothing that
    could be measured in decoding below a billion parameters."""
    deterministic: bool = False
    """Weights in float32, and kernels whose results do not depend on the batch where the build has
    them."""
    prefix_caching: bool = True
    """Keep keys and values of finished requests for whatever begins alike."""
    lora_rank: int = 0
    """Largest rank of the adapters that ``update_adapters`` may bring; 0 takes none."""
    sleep: bool = False
    """Allocate so that ``sleep`` can give memory back. The CPU build cannot."""
    seed: int = 0
    """Of what a request does not seed; every request does."""
    devices: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of the engine's process; None takes that of this process."""
    start_timeout_s: float = 900.0
    """For starting the process, loading vLLM and capturing graphs."""
    drain_timeout_s: float = 600.0
    """How long a weight update waits for unfinished requests before it fails."""
    call_timeout_s: float = 300.0
    """For the engine to answer to sleep, wake, a bucket of weights, or an adapter."""
    health_timeout_s: float = 60.0
    """How long the engine may take to answer that it is alive: longer than any one step."""
    bucket_mb: int = 256
    """MiB of weights that travel at once in ``update_weights``; a pool of replicas brings its own
    buckets."""
    log_path: str | None = None
    """Where vLLM's log goes and stays. None: a temporary file, whose end stands in the error of an
    engine that failed."""


@dataclass(slots=True, kw_only=True)
class OpenAIEngineConfig:
    """Settings of :class:`agentrl.rollout.engines.openai.OpenAIEngine`."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Of the server, up to and with ``/v1``."""
    model: str | None = None
    """Name that the server has for the model; None takes the only one that it serves."""
    api_key_env: str | None = None
    """Environment variable that holds the key; None sends none."""
    max_context: int = 1024
    """Most tokens of one session, prompt and answer together."""
    max_connections: int = 256
    """Requests at once; more wait."""
    timeout_s: float = 600.0
    """For one request."""
    max_retries: int = 4
    """Attempts after the first, of requests that failed for reasons of the server or the network:
    no connection, no answer, status 408, 429 or 500 and above. Others are not tried again."""
    retry_pause_s: float = 0.5
    """Before the first retry; doubled with each, up to half a minute, and spread at random."""


@dataclass(slots=True, kw_only=True)
class SGLangEngineConfig:
    """Settings of :class:`agentrl.rollout.engines.sglang.SGLangEngine`."""

    base_url: str = "http://127.0.0.1:{port}"
    """Of the server; ``{port}`` becomes ``port`` plus the number of the replica."""
    port: int = 30000
    """Of the first replica's server."""
    command: list[str] = field(default_factory=list)
    """Program and arguments of a server to start, with ``{port}`` for its port, for example
    ``[python, -m, sglang.launch_server, --model-path, PATH, --port, "{port}",
    --skip-tokenizer-init, --enable-deterministic-inference, --load-format, dummy]``. Empty: one
    that runs already."""
    api_key_env: str | None = None
    """Environment variable that holds the key; None sends none."""
    max_context: int = 1024
    """Most tokens of one session, prompt and answer together."""
    max_connections: int = 512
    """Requests at once; more wait."""
    deterministic: bool = False
    """Refuse a server that was started without ``--enable-deterministic-inference``: it takes no
    heed of the seeds of requests."""
    device: str = "cpu"
    """Of the buffer that weights are handed over in: the server's GPU as this process numbers it,
    or ``cpu``, which works with both."""
    bucket_mb: int = 256
    """MiB of weights that travel at once."""
    tensor_parallel: int = 1
    """The server's ``--tp-size``."""
    verify_tensors: int = 8
    """Tensors of which the first rows are read back after an update, in turn; the server can do so
    for Llamas. 0 reads none."""
    log_path: str | None = None
    """Where the log of a server that was started here goes; None: a temporary file, whose end
    stands in the error of a server that failed."""
    start_timeout_s: float = 900.0
    """For the server to answer that it is ready."""
    request_timeout_s: float = 3600.0
    """For one request."""
    drain_timeout_s: float = 600.0
    """How long a weight update waits for unfinished requests before it fails."""
    call_timeout_s: float = 300.0
    """For the server to answer to sleep, wake, or a bucket of weights."""
    health_timeout_s: float = 60.0
    """For the server to answer that it is alive."""
