"""Which tensor shapes a deterministic engine may use, found by trying them on this machine.

A kernel for matrix products picks its order of summation by shape, so the same row can come out
with other low bits in a batch of 3 than in one of 64; once in a while that changes a sampled
token. Two facts make determinism cheap. Rows of one shape are computed alike whatever stands
beside them; and, on every machine tried so far, alike in *all* shapes of at least four rows.
:func:`probe` takes neither on trust: it runs the decoder at the largest shape, then at every
smaller one, and keeps those that give the same bits. Where nothing but the largest shape
survives, the engine decodes at that shape only and prefills token by token within it: slower,
still exact, since then every key and value comes from one and the same shape.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.errors import EngineError
from agentrl.rollout.engines.hf_decoder import StaticDecoder
from agentrl.rollout.sampling import SamplingBatch, sample

_BATCHES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CHUNKS = (8, 16, 24, 32, 64)
_JOBS = (1, 2, 4, 8, 16, 32)
_LENGTH_STEP = 32
_PROBE_SEED = 20231


@dataclass(slots=True, kw_only=True)
class ShapePlan:
    """The shapes an engine computes in, each sorted upwards."""

    batches: list[int]
    """Rows of a decode step."""
    lengths: list[int]
    """Keys that a step looks at."""
    prefills: dict[int, list[int]]
    """Chunk of tokens -> numbers of sequences; empty where prefill goes through decode."""
    tokens: list[int]
    """Rows of the matrix products of a prefill that is not full."""

    def batch(self, rows: int) -> int:
        """Smallest batch that holds ``rows``."""
        return self.batches[bisect.bisect_left(self.batches, rows)]

    def length(self, tokens: int) -> int:
        """Smallest number of keys that holds ``tokens``."""
        return self.lengths[bisect.bisect_left(self.lengths, tokens)]

    def chunk(self, tokens: int) -> int:
        """Smallest chunk that holds ``tokens``, or the largest."""
        chunks = list(self.prefills)
        return chunks[min(bisect.bisect_left(chunks, tokens), len(chunks) - 1)]

    def jobs(self, chunk: int, waiting: int) -> int:
        """Smallest number of sequences that holds ``waiting``, or the largest."""
        sizes = self.prefills[chunk]
        return sizes[min(bisect.bisect_left(sizes, waiting), len(sizes) - 1)]

    def num_tokens(self, tokens: int, full: int) -> int:
        """Smallest number of rows that holds ``tokens``, of a prefill that holds ``full``."""
        index = bisect.bisect_left(self.tokens, tokens)
        return min(self.tokens[index], full) if index < len(self.tokens) else full


def candidates(num_slots: int, max_context: int, prefill_tokens: int) -> ShapePlan:
    """Every shape worth having: few enough to probe, close enough to waste little."""
    lengths = [*range(_LENGTH_STEP, max_context, _LENGTH_STEP), max_context]
    chunks = [c for c in _CHUNKS if c <= min(prefill_tokens, max_context)] or [max_context]
    return ShapePlan(
        batches=[*(b for b in _BATCHES if b < num_slots), num_slots],
        lengths=lengths,
        prefills={
            chunk: [n for n in _JOBS if n <= num_slots and n * chunk <= max(prefill_tokens, chunk)]
            for chunk in chunks
        },
        tokens=[*range(16, min(128, prefill_tokens), 16), *range(128, prefill_tokens, 32)],
    )


def probe(decoder: StaticDecoder, wanted: ShapePlan) -> ShapePlan:
    """Keep the shapes of ``wanted`` that give the bits of its largest one.

    Overwrites the cache. Runs two layers: all have the same shapes, and the keys of the second
    depend on everything that the first computes.

    Raises:
        EngineError: rows of one shape differ by where they stand, so nothing can be promised.
    """
    with torch.inference_mode(), decoder.first_layers(2):
        return _Probe(decoder, wanted).run()


class _Probe:
    def __init__(self, decoder: StaticDecoder, wanted: ShapePlan) -> None:
        self.decoder, self.wanted = decoder, wanted
        self.rows, self.full_length = wanted.batches[-1], wanted.lengths[-1]
        self.rng = np.random.default_rng(_PROBE_SEED)
        self.cache = decoder.cache[:2]
        noise = torch.Generator(self.cache.device).manual_seed(_PROBE_SEED)
        self.cache.normal_(generator=noise)
        self.ids = self.rng.integers(0, decoder.vocab_size, self.rows)

    def run(self) -> ShapePlan:
        self._check_positions()
        batches = [b for b in self.wanted.batches[:-1] if self._batch_agrees(b)]
        lengths = [n for n in self.wanted.lengths[:-1] if self._length_agrees(n)]
        plan = ShapePlan(
            batches=[*batches, self.rows],
            lengths=[*lengths, self.full_length],
            prefills={},
            tokens=[],
        )
        self._prepare_prefill()
        for chunk, sizes in self.wanted.prefills.items():
            good = [n for n in sizes if self._prefill_agrees(plan, n, chunk, n * chunk)]
            if good:
                plan.prefills[chunk] = good
        for tokens in self.wanted.tokens:
            shape = self._holding(plan, tokens)
            if shape is not None and self._prefill_agrees(plan, *shape, tokens):
                plan.tokens.append(tokens)
        return plan

    @staticmethod
    def _holding(plan: ShapePlan, tokens: int) -> tuple[int, int] | None:
        """Pick the smallest prefill that ``tokens`` do not fill, if there is one."""
        shapes = [(n, chunk) for chunk, sizes in plan.prefills.items() for n in sizes]
        larger = [shape for shape in shapes if shape[0] * shape[1] > tokens]
        return min(larger, key=lambda shape: shape[0] * shape[1], default=None)

    def _decode(self, ids: np.ndarray, positions: np.ndarray, length: int) -> torch.Tensor:
        """Logits and what sampling makes of them: [B, V + 2]."""
        num = len(ids)
        logits = self.decoder.decode(ids, positions, np.ones(num, bool), length)
        drawn, logprobs = sample(
            logits,
            SamplingBatch(
                temperature=np.full(num, 0.7, np.float32),
                top_p=np.ones(num, np.float32),
                top_k=np.zeros(num, np.int64),
                seed=ids.astype(np.uint64),
                index=np.zeros(num, np.uint64),
            ),
        )
        return torch.cat([logits.float(), drawn.unsqueeze(1).float(), logprobs.unsqueeze(1)], 1)

    def _check_positions(self) -> None:
        """Swap the rows of the full shape: each must take its result along."""
        positions = self.rng.integers(self.full_length // 2, self.full_length, self.rows)
        before = self._decode(self.ids, positions, self.full_length)
        order = self.rng.permutation(self.rows)
        self.cache.copy_(self.cache[:, :, torch.from_numpy(order).to(self.cache.device)])
        after = self._decode(self.ids[order], positions[order], self.full_length)
        if not torch.equal(after, before[torch.from_numpy(order).to(before.device)]):
            raise EngineError(
                "deterministic mode: this machine computes a row of a batch differently by its "
                "place in the batch, so results cannot be independent of arrival order; set "
                "deterministic=false, or another num_slots (a multiple of 16) or num_threads"
            )

    def _batch_agrees(self, batch: int) -> bool:
        positions = self.rng.integers(0, self.full_length, self.rows)
        full = self._decode(self.ids, positions, self.full_length)
        part = self._decode(self.ids[:batch], positions[:batch], self.full_length)
        return torch.equal(part, full[:batch])

    def _length_agrees(self, length: int) -> bool:
        positions = self.rng.integers(length // 2, length, self.rows)
        full = self._decode(self.ids, positions, self.full_length)
        return torch.equal(self._decode(self.ids, positions, length), full)

    def _prepare_prefill(self) -> None:
        """Write the tokens one by one at the full shape; prefills must reproduce that."""
        longest = max(self.wanted.prefills)
        self.starts = self.rng.integers(0, self.full_length - longest + 1, self.rows)
        self.written = self.rng.integers(0, self.decoder.vocab_size, (self.rows, longest))
        for offset in range(longest):
            self._decode(self.written[:, offset], self.starts + offset, self.full_length)

    def _prefill_agrees(self, plan: ShapePlan, size: int, chunk: int, tokens: int) -> bool:
        """Write ``tokens`` tokens again, spread over ``size`` rows, and compare."""
        rows = self.rng.permutation(self.rows)[:size]
        counts = np.full(size, tokens // size)
        counts[: tokens % size] += 1
        offset = (self.written.shape[1] - chunk) // 2
        ids = self.written[rows, offset : offset + chunk]
        starts = self.starts[rows] + offset
        spans = [
            self.cache[:, :, row, :, start : start + count]
            for row, start, count in zip(rows, starts, counts, strict=True)
        ]
        expected = [span.clone() for span in spans]
        length = plan.length(int((starts + counts).max()))
        self.decoder.prefill(ids, rows, starts, counts, length, tokens)
        agrees = all(map(torch.equal, spans, expected))
        for span, value in zip(spans, expected, strict=True):
            span.copy_(value)
        return agrees
