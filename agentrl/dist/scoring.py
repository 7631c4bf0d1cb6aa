"""Log-probabilities of the trained tokens of a micro-batch.

The trunk of the model runs over rows padded to the longest one; logits exist only at positions
that predict a trained token, at most :data:`MAX_LOGITS` of them at a time, so that nothing of
size [N, vocabulary] is kept where the vocabulary is large.

Legend: ``N`` tokens, ``B`` rows, ``T`` longest row, ``M`` trained tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl.batch import Batch

MAX_LOGITS = 2**26
"""Elements of one chunk of logits; more chunks are recomputed in the backward pass."""


class TokenScorer:
    """Scores trained tokens with a causal language model of transformers.

    Args:
        model: an ``AutoModelForCausalLM``.
        temperature: logits are divided by it, as the rollout engine does.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        self._model: Any = model
        self._temperature = temperature
        self._plain_head = _has_plain_head(model)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._model.device

    def __call__(self, batch: Batch, *, fields: Sequence[str]) -> dict[str, Tensor]:
        """Return the ``fields`` asked for, float32 [N], 0 where not trained.

        Takes the batch on the CPU; returns tensors on the model's device.

        Args:
            fields: of ``logprobs``, ``entropy`` (nats), ``sum_pi_squared`` (sum over the
                vocabulary of squared probabilities).

        Raises:
            ValueError: the first token of a row is to be trained: nothing predicts it.
        """
        trained = batch.tokens["loss_mask"].nonzero().squeeze(1)
        positions, rows = batch.positions[trained], batch.row_of_token[trained]
        if bool((positions == 0).any()):
            raise ValueError("loss_mask is set at the first token of a row, which nothing predicts")
        # The last token of a row predicts nothing that is known, so it need not be fed.
        ids = batch.to_padded("ids")[:, :-1].long()
        predictors = rows * ids.shape[1] + positions - 1
        targets = batch.tokens["ids"][trained].long()
        device = self._model.device
        scores = self._score(ids.to(device), predictors.to(device), targets.to(device), fields)
        places = trained.to(device)
        zeros = torch.zeros(batch.num_tokens, device=device)
        return {
            name: zeros.index_copy(0, places, score)
            for name, score in zip(fields, scores, strict=True)
        }

    def _score(
        self, ids: Tensor, predictors: Tensor, targets: Tensor, fields: Sequence[str]
    ) -> tuple[Tensor, ...]:
        """Score [M] targets from [B, T - 1] ids; ``predictors`` index the flattened ids."""
        if self._plain_head:
            # Right-padded rows under a causal mask: padding is never attended to by a real token.
            states = self._model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            head = self._model.get_output_embeddings()
        else:
            states, head = self._model(input_ids=ids, use_cache=False).logits, nn.Identity()
        states = states.flatten(0, 1).index_select(0, predictors)
        vocabulary = self._model.config.get_text_config().vocab_size
        rows_per_chunk = max(1, MAX_LOGITS // vocabulary)
        if len(states) <= rows_per_chunk:
            return _from_logits(head(states), targets, self._temperature, fields)

        def chunk(part: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
            return _from_logits(head(part), wanted, self._temperature, fields)

        parts = [
            checkpoint(chunk, part, wanted, use_reentrant=False)
            for part, wanted in zip(
                states.split(rows_per_chunk), targets.split(rows_per_chunk), strict=True
            )
        ]
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _from_logits(
    logits: Tensor, targets: Tensor, temperature: float, fields: Sequence[str]
) -> tuple[Tensor, ...]:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    if tuple(fields) == ("logprobs",):
        return (-F.cross_entropy(scaled, targets, reduction="none"),)
    log_softmax = scaled.log_softmax(-1)
    probs = log_softmax.exp()
    scores = {
        "logprobs": lambda: log_softmax.gather(1, targets[:, None]).squeeze(1),
        "entropy": lambda: -(probs * log_softmax).sum(-1),
        "sum_pi_squared": lambda: probs.square().sum(-1),
    }
    return tuple(scores[name]() for name in fields)


@torch.no_grad()
def _has_plain_head(model: Any) -> bool:
    """Return whether logits are the output embedding of the last hidden state and nothing else.

    Some families scale or cap their logits afterwards; for those the whole model is run.
    """
    probe = torch.arange(4, device=next(model.parameters()).device)[None]
    states = model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state
    logits = model(input_ids=probe, use_cache=False).logits
    return torch.allclose(model.get_output_embeddings()(states), logits, atol=1e-5, rtol=1e-5)
