"""Scores of trained tokens with the very bits that the ``hf`` rollout engine records.

What it costs: rows go through the model in the chunks of the engine's prefill, not packed
(``benchmarks/mismatch.py --exact-cost`` measures it). What it gives: the mismatch between the
policy that sampled and the one that is trained is exactly 0, in the pass that is differentiated.

Legend: ``N`` tokens, ``M`` trained tokens, ``E`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.batch import Batch
from agentrl.dist.exact_model import Chunk, ExactModel, Keys
from agentrl.errors import ModelError
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import threads_for
from agentrl.rollout.engines.hf_decoder import StaticDecoder
from agentrl.rollout.engines.hf_shapes import ShapePlan, candidates, probe
from agentrl.rollout.engines.hf_weights import refusal

_FIELDS = ("logprobs", "entropy", "sum_pi_squared")


class ExactScorer:
    """Stands in for :class:`~agentrl.dist.scoring.TokenScorer`; alone on one process.

    Args:
        model: a causal language model of ``transformers`` in float32.
        engine: settings of the rollout engine: its shapes depend on them.
        temperature: of the sampled distribution.

    Raises:
        ModelError: the engine's decoder cannot serve the model, or this machine computes a prefill
            otherwise than a decode step.
    """

    def __init__(self, model: Any, engine: HFEngineConfig, *, temperature: float = 1.0) -> None:
        if (why := refusal(model, engine.max_context)) is not None:
            raise ModelError(
                f"actor.exact: the decoder of rollout=hf cannot serve this model ({why}), so there "
                "is nothing to be equal to; set actor.exact=false"
            )
        self._model = ExactModel(model, max_context=engine.max_context)
        self._max_context = engine.max_context
        self._num_threads = threads_for(model, engine)
        self._temperature = temperature
        with self._threads():
            self._plan = _shapes(model, engine)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._model.device

    def __call__(self, batch: Batch, *, fields: Sequence[str]) -> dict[str, Tensor]:
        """Return the ``fields`` asked for, float32 [N], 0 where not trained.

        Args:
            fields: ``logprobs``, ``entropy`` (nats) and ``sum_pi_squared`` (sum over the
                vocabulary of squared probabilities).

        Raises:
            ValueError: the first token of a row is to be trained: nothing predicts it; or a field
                that a policy does not know.
            ModelError: a row is longer than the engine's context.
        """
        self._check(batch, fields)
        trained = batch.trained
        with self._threads():
            hidden, place = self._states(batch)
            before = hidden.index_select(0, place[trained - 1])
            targets = batch.tokens["ids"].long()[trained].to(self.device)
            scores = self._scores(before, targets, tuple(fields))
        zeros = torch.zeros(batch.num_tokens, device=self.device)
        where = trained.to(self.device)
        return {
            name: zeros.index_copy(0, where, score)
            for name, score in zip(fields, scores, strict=True)
        }

    def _check(self, batch: Batch, fields: Sequence[str]) -> None:
        if unknown := set(fields) - set(_FIELDS):
            raise ValueError(f"a policy does not know {sorted(unknown)}; it knows {_FIELDS}")
        if bool(torch.isin(batch.trained, batch.cu_seqlens[:-1]).any()):
            raise ValueError("loss_mask is set at the first token of a row, which nothing predicts")
        longest = int(batch.lengths.max()) if batch.num_rows else 0
        if longest > self._max_context:
            raise ModelError(
                f"actor.exact: a row of {longest} tokens is longer than the context of the rollout "
                f"engine, {self._max_context}; raise rollout.max_context_tokens"
            )

    # ------------------------------------------------------------------ sequences

    def _states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the states of all tokens but the last of each row, and where each token's are.

        Returns:
            float32 [K, E] in order of computation; int64 [N], index into it.
        """
        layers = self._model.layers()
        lengths = batch.lengths - 1
        order = torch.argsort(lengths, descending=True, stable=True)
        chunk = self._plan.chunk(max(int(lengths.max()), 1))
        size = self._plan.jobs(chunk, batch.num_rows)
        states: list[Tensor] = []
        place = torch.zeros(batch.num_tokens, dtype=torch.int64)
        offset = 0
        for rows in order.split(size):
            cache = Keys()
            for start in range(0, int(lengths[rows[0]]), chunk):
                inputs, tokens = self._chunk(batch, rows, start, chunk, size)
                found = self._model.hidden(inputs, layers, cache)
                states.append(found[: len(tokens)])
                place[tokens] = torch.arange(offset, offset + len(tokens))
                offset += len(tokens)
        return torch.cat(states), place.to(self.device)

    def _chunk(
        self, batch: Batch, rows: Tensor, start: int, chunk: int, size: int
    ) -> tuple[Chunk, Tensor]:
        """Lay out tokens ``start`` to ``start + chunk`` of ``rows``, among ``size`` sequences.

        Returns:
            the inputs, and the place in the batch of each real token, int64.
        """
        counts = np.zeros(size, np.int64)
        counts[: len(rows)] = (batch.lengths[rows] - 1 - start).clamp(0, chunk).numpy()
        first = np.zeros(size, np.int64)
        first[: len(rows)] = batch.cu_seqlens[rows].numpy() + start
        real = np.arange(chunk) < counts[:, None]
        flat = np.flatnonzero(real)
        tokens = torch.from_numpy((first[:, None] + np.arange(chunk)).reshape(-1)[flat])
        total = self._plan.num_tokens(len(flat), size * chunk)
        ids, positions, from_padded = (np.zeros(total, np.int64) for _ in range(3))
        ids[: len(flat)] = batch.tokens["ids"][tokens].numpy()
        padded = np.where(real, start + np.arange(chunk), 0).reshape(-1)
        positions[: len(flat)], from_padded[: len(flat)] = padded[flat], flat
        to_padded = np.zeros(size * chunk, np.int64)
        to_padded[flat] = np.arange(len(flat))
        inputs = Chunk(
            ids=self._tensor(ids),
            positions=self._tensor(positions),
            query_positions=self._tensor(padded),
            from_padded=self._tensor(from_padded),
            to_padded=self._tensor(to_padded),
            num_sequences=size,
            size=chunk,
            num_keys=self._plan.length(start + int(counts.max())),
        )
        return inputs, tokens

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # ------------------------------------------------------------------ vocabulary

    def _scores(self, before: Tensor, targets: Tensor, fields: tuple[str, ...]) -> list[Tensor]:
        """Score tokens ``targets`` [M] that follow the states ``before`` [M, E]: [M] per field."""
        batch = self._plan.batches[-1]
        found: list[tuple[Tensor, ...]] = []
        for start in range(0, len(targets), batch):
            states, ids = before[start : start + batch], targets[start : start + batch]
            missing = batch - len(ids)
            if missing:
                states = torch.cat([states, states[:1].expand(missing, -1)])
                ids = torch.cat([ids, ids[:1].expand(missing)])
            # Logits are computed again in the backward pass: they are what takes memory.
            scored = checkpoint(self._of_block, states, ids, fields, use_reentrant=False)
            found.append(tuple(score[: batch - missing] for score in scored))  # pyright: ignore
        if not found:
            return [torch.zeros(0, device=self.device) for _ in fields]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _of_block(self, states: Tensor, ids: Tensor, fields: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Score a block as :func:`agentrl.rollout.sampling.sample` records it."""
        logits = self._model.logits(states)
        if self._temperature not in (0.0, 1.0):
            scale = torch.full((len(ids), 1), self._temperature, device=self.device)
            logits = logits / scale
        probs = torch.softmax(logits, dim=-1)
        scores = {"logprobs": probs.gather(1, ids.unsqueeze(1)).squeeze(1).log()}
        if "entropy" in fields:
            scores["entropy"] = -(probs * torch.log_softmax(logits, dim=-1)).sum(-1)
        if "sum_pi_squared" in fields:
            scores["sum_pi_squared"] = probs.square().sum(-1)
        return tuple(scores[name] for name in fields)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """As the engine computes: the bits of a kernel may depend on the number of threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _shapes(model: Any, engine: HFEngineConfig) -> ShapePlan:
    """Find the shapes in which the engine's decoder is exact on this machine.

    Raises:
        ModelError: it has none for prefill.
    """
    decoder = StaticDecoder(
        model,
        num_rows=engine.num_slots,
        max_context=engine.max_context,
        device=next(model.parameters()).device,
        dtype=torch.float32,
    )
    wanted = candidates(engine.num_slots, engine.max_context, engine.prefill_tokens)
    plan = probe(decoder, wanted)
    decoder.free()
    if not plan.prefills:
        raise ModelError(
            "actor.exact: on this machine a prefill gives other bits than decode steps, so that a "
            "sequence cannot be scored at once; set actor.exact=false"
        )
    return plan
