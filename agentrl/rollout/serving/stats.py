"""What a set of replicas has done, as numbers for ``metrics.jsonl`` and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.types import Generation

READ_TIMEOUT_S = 5.0


@dataclass(slots=True)
class ServingStats:
    """Counts since the start."""

    turns: int = 0
    """That were returned."""
    aborted: int = 0
    """Of them, with stop reason ABORT."""
    continuations: int = 0
    """Turns that went on after a weight update had interrupted them."""
    replays: int = 0
    """Turns whose engine was lost."""
    restarts: int = 0
    """Replicas that were started again."""
    updates: int = 0
    """Weight updates."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    known_prompt_tokens: int = 0
    """Of prompts whose engine says how much it had in its cache."""
    cached_tokens: int = 0
    """Of those, found in the cache."""
    affinity_kept: int = 0
    """Turns that went to the replica which holds most of their prompt."""
    affinity_moved: int = 0
    """Turns that went elsewhere although one does."""

    def count(self, prompt_tokens: int, generation: Generation) -> None:
        """Count a turn that is returned."""
        self.turns += 1
        self.aborted += generation.stop_reason == "abort"
        self.prompt_tokens += prompt_tokens
        self.sampled_tokens += len(generation.ids)
        if generation.num_cached_tokens is not None:
            self.known_prompt_tokens += prompt_tokens
            self.cached_tokens += generation.num_cached_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that were in a prefix cache, as far as engines say."""
        return self.cached_tokens / max(self.known_prompt_tokens, 1)


COUNTERS = (
    "turns", "aborted", "continuations", "replays", "restarts", "updates", "prompt_tokens",
    "sampled_tokens", "cached_tokens", "affinity_kept", "affinity_moved",
)  # fmt: skip

_RATE, _PROMPT_TOKENS = "serving/cache_hit_rate", "serving/prompt_tokens"


def metrics(
    stats: ServingStats, *, running: Mapping[int, int], waiting: int, serving: int
) -> dict[str, float]:
    """Return flat numbers under ``serving/``; counts are since the start.

    Args:
        running: replica -> requests that it works at.
        waiting: requests without a replica.
        serving: replicas that can be given requests.
    """
    found = {
        "serving/running": sum(running.values()),
        "serving/waiting": waiting,
        "serving/replicas": serving,
        "serving/cache_hit_rate": stats.cache_hit_rate,
    }
    found |= {f"serving/{name}": getattr(stats, name) for name in COUNTERS}
    found |= {f"serving/replica_{number}/running": count for number, count in running.items()}
    return {name: float(value) for name, value in found.items()}


def merged(sets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers of several sets of replicas as those of one, replicas numbered through.

    Args:
        sets: of :func:`metrics`.
    """
    total: dict[str, float] = {}
    cached = num_replicas = 0.0
    for found in sets:
        first, cached = int(num_replicas), cached + found[_RATE] * found[_PROMPT_TOKENS]
        for key, value in found.items():
            scope, _, rest = key.removeprefix("serving/").partition("/")
            if rest:  # of one replica
                num_replicas += 1
                key = f"serving/replica_{first + int(scope.removeprefix('replica_'))}/{rest}"
            total[key] = total.get(key, 0.0) + value
    if total:
        total[_RATE] = cached / max(total[_PROMPT_TOKENS], 1.0)
    return total


def prometheus_text(found: Mapping[str, float]) -> str:
    """Return metrics of :func:`metrics` in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    typed: set[str] = set()
    for key, value in found.items():
        parts = key.split("/")
        name, labels = "_".join(["agentrl", parts[0], parts[-1]]), ""
        if len(parts) == 3:
            number = parts[1].removeprefix("replica_")
            name = f"agentrl_serving_replica_{parts[-1]}"
            labels = f'{{replica="{number}"}}'
        counter = parts[-1] in COUNTERS
        name += "_total" if counter else ""
        if name not in typed:
            typed.add(name)
            lines.append(f"# TYPE {name} {'counter' if counter else 'gauge'}")
        lines.append(f"{name}{labels} {value:.17g}")
    return "\n".join(lines) + "\n"


class MetricsEndpoint:
    """Answers ``GET /metrics`` on 127.0.0.1.

    Written out by hand: one page in one format is less than a client library and its server thread.

    Args:
        port: 0 takes a free one; the attribute tells which.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._server: asyncio.Server | None = None

    async def open(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Listen.

        Args:
            read: returns the present numbers.

        Raises:
            OSError: the port is taken.
        """

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    line = await reader.readline()
                    while (await reader.readline()).strip():
                        pass
                known = line.split()[:2] == [b"GET", b"/metrics"]
                body = prometheus_text(read()).encode() if known else b"see /metrics\n"
                head = (
                    f"HTTP/1.1 {'200 OK' if known else '404 Not Found'}\r\n"
                    "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                async with asyncio.timeout(READ_TIMEOUT_S):
                    await writer.drain()
            except (OSError, ValueError, TimeoutError):
                pass  # whoever asked has gone, or sends what is no request
            finally:
                writer.close()

        self._server = await asyncio.start_server(answer, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
