"""A sequence-classification model of transformers as a reward model, in this process.

In a pool of its own the same class runs there: see :mod:`agentrl.reward.service`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from agentrl.agent.template import ChatTemplate
from agentrl.env.base import Episode
from agentrl.errors import ConfigError, RenderError, RewardError
from agentrl.reward.batching import Batcher
from agentrl.tool.deadline import OffLoop
from agentrl.types import Message

LOAD_TIMEOUT_S = 600.0


class HFClassifier:
    """Scores the conversation, rendered with the reward model's own chat template.

    Text of messages that spells a control token of the reward model is written apart, so that a
    policy cannot forge a turn. A conversation that is longer than ``max_tokens`` loses its
    beginning, and ``cut_tokens`` says how much.

    Args:
        model: a hub id or directory of an ``AutoModelForSequenceClassification``.
        max_tokens: of a conversation.
        label: which logit is the score; needed where the model has more than one.
        activation: what is made of the logits: nothing, a sigmoid, or a softmax over the labels.
        device: ``auto`` is CUDA where there is one.
        dtype: of the weights.
        max_batch: conversations scored at once.
        batch_window_s: how long a first conversation waits for others.

    Raises:
        ConfigError: an argument out of range.
    """

    def __init__(
        self,
        *,
        model: str,
        max_tokens: int = 4096,
        label: int | None = None,
        activation: Literal["none", "sigmoid", "softmax"] = "none",
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_batch: int = 16,
        batch_window_s: float = 0.02,
    ) -> None:
        for name, value in {"max_tokens": max_tokens, "max_batch": max_batch}.items():
            if value < 1:
                raise ConfigError(f"hf_classifier: {name}={value}: must be at least 1")
        if not 0 <= batch_window_s < float("inf"):
            raise ConfigError(f"hf_classifier: batch_window_s={batch_window_s}: must be at least 0")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", device):
            raise ConfigError(f"hf_classifier: device={device!r}: write auto, cpu, cuda or cuda:N")
        if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
            raise ConfigError(f"hf_classifier: model={model!r}: no such directory")
        self._source = model
        self._max_tokens = max_tokens
        self._label = label
        self._activation = activation
        self._device = device
        self._dtype = dtype
        self._batcher: Batcher[list[int], float] = Batcher(
            self._score_batch, max_items=max_batch, window_s=batch_window_s
        )
        self._model: Any = None
        self._tokenizer: Any = None
        self._template: ChatTemplate | None = None
        self._controls: re.Pattern[str] | None = None

    async def open(self) -> None:
        """Load the model.

        Raises:
            ConfigError: it cannot be loaded, has no chat template, or not the label asked for.
        """
        if self._model is None:
            await OffLoop().run(self._load, LOAD_TIMEOUT_S)

    async def close(self) -> None:
        """Let go of the model."""
        await self._batcher.close()
        self._model = None

    async def grade(self, episode: Episode, *, timeout_s: float) -> dict[str, float]:
        """Return the model's score, and ``cut_tokens``. Raises as :meth:`score_messages`."""
        return await self.score_messages(episode.messages, timeout_s=timeout_s)

    async def score_messages(
        self, messages: Sequence[Message], *, timeout_s: float
    ) -> dict[str, float]:
        """Score a conversation, in one batch with others that come at the same time.

        Raises:
            RewardServiceError: the model did not compute it within ``timeout_s``.
            RewardError: the reward model's template refuses the conversation.
        """
        await self.open()
        ids = self._encode(messages)
        kept = ids[-self._max_tokens :]
        score = await self._batcher.ask(kept, timeout_s=timeout_s)
        return {"score": score, "cut_tokens": float(len(ids) - len(kept))}

    # ------------------------------------------------------------------ text

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        assert self._template is not None
        try:
            text = self._template.render([self._disarmed(m) for m in messages], generation=False)
        except RenderError as error:
            raise RewardError(f"reward model {self._source!r}: {error}") from error
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _disarmed(self, value: Any) -> Any:
        """Return a message with control tokens in its texts written apart."""
        if isinstance(value, str):
            if self._controls is None:
                return value
            return self._controls.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", value)
        if isinstance(value, dict):
            return {key: self._disarmed(item) for key, item in value.items()}
        return [self._disarmed(item) for item in value] if isinstance(value, list) else value

    # ------------------------------------------------------------------ the model, on a thread

    def _load(self) -> None:
        import torch

        where = f"hf_classifier: model={self._source!r}"
        model = self._open(where)
        try:
            self._template = ChatTemplate(self._tokenizer)
        except RenderError as error:
            raise ConfigError(f"{where}: {error}") from error
        self._refuse_unusable(model, where)
        self._controls = _control_tokens(self._tokenizer)
        device = self._device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        # Pooling finds the last token by the padding id; without one, rows are scored singly.
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.eval().requires_grad_(False).to(device)

    def _open(self, where: str) -> Any:
        """Load tokenizer and model; returns the model."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from agentrl.model.load import quiet_transformers

        source = self._source
        if Path(source).expanduser().is_dir():
            source = str(Path(source).expanduser())
        try:
            with quiet_transformers():
                self._tokenizer = AutoTokenizer.from_pretrained(source)
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    source, dtype=getattr(torch, self._dtype), output_loading_info=True
                )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if report["missing_keys"]:
            raise ConfigError(
                f"{where} has no weights for {', '.join(sorted(report['missing_keys'])[:3])}, "
                "which would be random: give a model that was trained as a classifier"
            )
        return model

    def _refuse_unusable(self, model: Any, where: str) -> None:
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and self._max_tokens > positions:
            raise ConfigError(
                f"{where} has {positions} positions, fewer than max_tokens={self._max_tokens}; set "
                f"max_tokens={positions}"
            )
        num_labels = model.config.num_labels
        if self._label is None and num_labels > 1:
            raise ConfigError(
                f"{where} has {num_labels} labels ({model.config.id2label}); say which one is the "
                "score with label=INDEX"
            )
        if self._label is not None and not 0 <= self._label < num_labels:
            raise ConfigError(f"{where}: label={self._label}: must be below {num_labels}")

    def _score_batch(self, rows: Sequence[list[int]]) -> list[float]:
        """Return one score a row of ids."""
        import torch

        model = self._model
        if len(rows) > 1 and model.config.pad_token_id is None:
            return [self._score_batch([row])[0] for row in rows]
        width = max(map(len, rows))
        pad = model.config.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
        scores = logits.logits.float()
        if self._activation == "softmax":
            scores = scores.softmax(-1)
        elif self._activation == "sigmoid":
            scores = scores.sigmoid()
        return scores[:, self._label or 0].tolist()


def _control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """What a conversation must not contain as text; None where there is nothing."""
    added = tokenizer.added_tokens_decoder.values()
    special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
