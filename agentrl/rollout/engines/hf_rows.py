"""The running requests of a batch as vectors, one entry per row: no Python per row and step."""

from __future__ import annotations

import numpy as np

from agentrl.rollout.sampling import SamplingBatch
from agentrl.types import SamplingParams


class DecodeRows:
    """State of up to ``num_rows`` requests that are being decoded.

    Args:
        num_rows: rows of the cache.
        max_context: most tokens of one request.
    """

    def __init__(self, num_rows: int, max_context: int) -> None:
        self.active = np.zeros(num_rows, bool)
        self.next_id = np.zeros(num_rows, np.int64)
        """The token to feed."""
        self.position = np.zeros(num_rows, np.int64)
        """Where it goes."""
        self.num_done = np.zeros(num_rows, np.int64)
        """Tokens sampled so far."""
        self.first_index = np.zeros(num_rows, np.int64)
        """Number of the first of them within its turn."""
        self.max_tokens = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.uint64)
        self.temperature = np.ones(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.stops = np.full((num_rows, 1), -1, np.int64)
        self.ids = np.zeros((num_rows, max_context), np.int64)
        self.logprobs = np.zeros((num_rows, max_context), np.float32)
        self._state = (
            "active", "next_id", "position", "num_done", "first_index", "max_tokens", "seed",
            "temperature", "top_p", "top_k", "stops", "ids", "logprobs",
        )  # fmt: skip

    def start(self, row: int, last_id: int, position: int, sampling: SamplingParams) -> None:
        """Begin to decode in ``row``, feeding ``last_id`` at ``position`` first."""
        self.active[row] = True
        self.next_id[row], self.position[row] = last_id, position
        self.num_done[row], self.max_tokens[row] = 0, sampling.max_tokens
        self.first_index[row], self.seed[row] = sampling.first_index, sampling.seed
        self.temperature[row] = sampling.temperature
        self.top_p[row], self.top_k[row] = sampling.top_p, sampling.top_k
        num_stops = len(sampling.stop_token_ids)
        if num_stops > self.stops.shape[1]:
            wider = ((0, 0), (0, num_stops - self.stops.shape[1]))
            self.stops = np.pad(self.stops, wider, constant_values=-1)
        self.stops[row] = -1
        self.stops[row, :num_stops] = sampling.stop_token_ids

    def move(self, source: int, target: int) -> None:
        """Let ``target`` go on where ``source`` stood."""
        for name in self._state:
            values = getattr(self, name)
            values[target] = values[source]
        self.active[source] = False

    def sampling(self, batch: int) -> SamplingBatch:
        """Parameters of the first ``batch`` rows; inactive ones sample plainly."""
        idle = ~self.active[:batch]
        return SamplingBatch(
            temperature=np.where(idle, np.float32(1.0), self.temperature[:batch]),
            top_p=np.where(idle, np.float32(1.0), self.top_p[:batch]),
            top_k=np.where(idle, 0, self.top_k[:batch]),
            seed=self.seed[:batch],
            index=(self.first_index[:batch] + self.num_done[:batch]).astype(np.uint64),
        )

    def record(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take in one sampled token per active row.

        Args:
            ids: [B] int64, for the rows 0..B-1.
            logprobs: [B] float32.

        Returns:
            the rows that are finished (stopped or full), and those among the active whose
            log-probability is not finite.
        """
        rows = np.flatnonzero(self.active[: len(ids)])
        ids, logprobs = ids[rows], logprobs[rows]
        self.ids[rows, self.num_done[rows]] = ids
        self.logprobs[rows, self.num_done[rows]] = logprobs
        self.num_done[rows] += 1
        self.position[rows] += 1
        self.next_id[rows] = ids
        stopped = (self.stops[rows] == ids[:, None]).any(axis=1)
        full = self.num_done[rows] >= self.max_tokens[rows]
        return rows[stopped | full], rows[~np.isfinite(logprobs)]

    def result(self, row: int) -> tuple[list[int], list[float], bool]:
        """Return ids, log-probabilities, and whether the last id is a stop token."""
        count = int(self.num_done[row])
        ids = self.ids[row, :count].tolist()
        stopped = bool(count) and ids[-1] in self.stops[row].tolist()
        return ids, self.logprobs[row, :count].tolist(), stopped
