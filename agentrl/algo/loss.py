"""The loss of a mini-batch: every token's policy loss, its weight, and what is added to it.

The losses of single tokens stand in :mod:`agentrl.algo.policy_losses` and its siblings. Legend:
``N`` tokens of a micro-batch, ``M`` trained ones of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from agentrl.algo.kl import LOG_RATIO_LIMIT, kl_estimate
from agentrl.algo.plug_in import blamed
from agentrl.batch import Batch
from agentrl.errors import ConfigError, TrainingError
from agentrl.kwargs import check_kwargs
from agentrl.registry import Registry

LARGEST_SETTING = 1e6
"""No setting of a loss is above; a wider one only catches a slip of the hand."""
MAX_TURN_KEYS = 8
"""Turns that have metrics of their own: entropy, and mass of advantage."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LossInput:
    """What a token loss sees of a micro-batch: its trained tokens, rows whole and in order."""

    logprobs: Tensor
    """float32 [M], of the present policy, with gradient."""
    old_logprobs: Tensor
    """float32 [M], of the policy that the ratio is against."""
    advantages: Tensor
    """float32 [M]"""
    row: Tensor
    """int64 [M]: which sequence a token is of, 0-based within the micro-batch."""
    num_rows: int
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [M]: what the loss's ``prepare`` put there."""

    @property
    def log_ratio(self) -> Tensor:
        """Log of new over old probability, clamped to what can be exponentiated: [M]."""
        difference = self.logprobs - self.old_logprobs
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(slots=True, frozen=True)
class TokenLoss:
    """What a loss says of each token; all [M]."""

    loss: Tensor
    """float32, with gradient."""
    ratio: Tensor
    """float32, new over old probability (or what the loss uses in its place)."""
    clipped: Tensor
    """bool: a bound acts (the gradient is cut off, or its weight capped)."""


class TokenLossFn(Protocol):
    """A loss per token: a frozen dataclass whose fields are its settings."""

    uses_ratio: ClassVar[bool]
    """Whether the gradient is weighed by the ratio to ``old_logprobs``. Where those are the
    engine's, such a loss corrects for the mismatch with the engine by itself; one without may be
    weighed by importance weights instead."""

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each of the [M] tokens."""
        ...


@runtime_checkable
class PreparedLoss(Protocol):
    """A loss that chooses tokens over a whole mini-batch.

    It costs a forward pass of the mini-batch before its update, which makes the choice independent
    of how the mini-batch is cut.
    """

    def prepare(
        self,
        logprobs: Tensor,
        advantages: Tensor,
        *,
        old_logprobs: Tensor,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Return token fields for :attr:`LossInput.extra`, name -> [M].

        Args:
            logprobs: float32 [M], of the policy that is about to be updated, at the trained tokens
                of the whole mini-batch (over all ranks).
            advantages, old_logprobs: float32 [M], of the same tokens.
            generator: for choices by chance.
        """
        ...


LOSSES: Registry[Callable[..., TokenLossFn]] = Registry(
    "policy loss",
    "agentrl.losses",
    {
        "vanilla": "agentrl.algo.policy_losses:Vanilla",
        "cispo": "agentrl.algo.policy_losses:CISPO",
        "sapo": "agentrl.algo.policy_losses:SAPO",
        "dro": "agentrl.algo.policy_losses:DRO",
        "reinforce": "agentrl.algo.policy_losses:Reinforce",
        "gpg": "agentrl.algo.policy_losses:Reinforce",
        "gspo": "agentrl.algo.sequence_losses:GSPO",
        "geo_mean": "agentrl.algo.sequence_losses:GeoMean",
        "clip_cov": "agentrl.algo.covariance_losses:ClipCov",
        "kl_cov": "agentrl.algo.covariance_losses:KLCov",
        "dppo_tv": "agentrl.algo.divergence_losses:DPPOTV",
        "dppo_kl": "agentrl.algo.divergence_losses:DPPOKL",
    },
)
"""Name -> dataclass. More come by entry point or import path."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy: a :class:`~agentrl.dist.engine.LossFn`.

    Reads the token fields ``loss_mask``, ``advantages``, ``old_logprobs`` (of the policy that the
    ratio is against), ``loss_weights`` (:func:`~agentrl.algo.aggregate.token_weights` over the
    whole mini-batch); where there, ``is_weights``, ``turn`` and the fields in ``extra``; and
    ``ref_logprobs`` if ``kl_coef`` is not 0.

    Metrics are shares of the mini-batch: those of its micro-batches add up to means over trained
    tokens. Names that end in ``_max`` are combined by maximum.
    """

    token_loss: TokenLossFn
    num_tokens: int
    """Trained tokens of the whole mini-batch, over all ranks."""
    num_turn_tokens: Mapping[int, int] = field(default_factory=dict)
    """The same by turn index, for the entropy of each turn; empty: not reported."""
    extra: tuple[str, ...] = ()
    """Token fields for ``token_loss``."""
    entropy_coef: float = 0.0
    """Bonus per nat of entropy."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss."""
    kl_kind: str = "k3"

    def __post_init__(self) -> None:
        """Refuse a loss that chooses tokens without its choice."""
        if isinstance(self.token_loss, PreparedLoss) and not self.extra:
            raise ValueError(
                f"{type(self.token_loss).__name__} chooses tokens over the mini-batch, but extra "
                "is empty: call prepare(), put its result into the batch and name it in extra"
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """What the model is asked for at every trained token."""
        return ("logprobs", "entropy")

    def __call__(
        self, scores: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the loss, and of the metrics.

        Everything is computed in float32, whatever the inputs are.
        """
        trained = batch.trained
        tokens = {name: value[trained] for name, value in batch.tokens.items()}
        new, old = scores["logprobs"][trained].float(), tokens["old_logprobs"].float()
        token_loss = _run(
            self.token_loss,
            LossInput(
                logprobs=new,
                old_logprobs=old,
                advantages=tokens["advantages"].float(),
                row=batch.row_of_trained,
                num_rows=batch.num_rows,
                extra={name: tokens[name] for name in self.extra},
            ),
        )
        per_token = token_loss.loss
        if "is_weights" in tokens:
            per_token = per_token * tokens["is_weights"].float()
        total = max(self.num_tokens, 1)
        metrics = {
            "pg_clipfrac": torch.count_nonzero(token_loss.clipped) / total,
            "kl": kl_estimate(old, new.detach(), "k3").sum() / total,
            "ratio_max": token_loss.ratio.detach().max() if len(new) else new.new_zeros(()),
        }
        if self.kl_coef:
            reference = tokens["ref_logprobs"].float()
            per_token = per_token + self.kl_coef * kl_estimate(new, reference, self.kl_kind)
            metrics["ref_kl"] = kl_estimate(new.detach(), reference, "k3").sum() / total
        if "entropy" in scores:
            entropy = scores["entropy"][trained]
            metrics |= self._entropy_metrics(entropy.detach(), tokens.get("turn"))
            if self.entropy_coef:
                per_token = per_token - self.entropy_coef * entropy
        elif self.entropy_coef:
            raise ValueError("entropy_coef is set, but the scores hold no entropy")
        loss = (per_token * tokens["loss_weights"]).sum()
        metrics["loss"] = loss.detach()
        return loss, metrics

    def _entropy_metrics(self, entropy: Tensor, turn: Tensor | None) -> dict[str, Tensor]:
        """Mean entropy over all trained tokens, and over those of each turn."""
        metrics = {"entropy": entropy.sum() / max(self.num_tokens, 1)}
        for index, count in self.num_turn_tokens.items():
            assert turn is not None, "num_turn_tokens counts by the token field turn"
            of_turn = torch.where(turn == index, entropy, 0.0)
            metrics[f"entropy/turn_{index + 1}"] = of_turn.sum() / max(count, 1)
        return metrics


@dataclass(slots=True, frozen=True, kw_only=True)
class SupervisedLoss:
    """Negative log-likelihood of the trained tokens, in nats.

    Reads ``loss_mask`` and ``loss_weights``, the weight of every token in the mini-batch.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """What the model is asked for at every trained token."""
        return ("logprobs",)

    def __call__(
        self, scores: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the loss."""
        trained = batch.trained
        weights = batch.tokens["loss_weights"][trained]
        loss = -(scores["logprobs"][trained] * weights).sum()
        return loss, {"loss": loss.detach()}


def make_loss(name: str, kwargs: Mapping[str, Any]) -> TokenLossFn:
    """Build a token loss by name or import path.

    Raises:
        RegistryError: nothing of that name.
        ConfigError: an argument that it does not take, lacks or cannot work with; a class of the
            user's that does not say whether it ``uses_ratio``.
    """
    target = LOSSES.get(name)
    if not isinstance(target, type):
        raise ConfigError(
            f"algo.loss={name!r} is {target!r}; give a class (a frozen dataclass whose fields are "
            "its settings) with __call__(self, inputs: LossInput) -> TokenLoss"
        )
    check_kwargs(target, kwargs, key="algo.loss_kwargs")
    for setting, value in kwargs.items():
        if isinstance(value, float) and not abs(value) <= LARGEST_SETTING:
            raise ConfigError(
                f"algo.loss_kwargs.{setting}={value}: must be a finite number of at most "
                f"{LARGEST_SETTING:g}"
            )
    loss = target(**kwargs)
    if not isinstance(getattr(loss, "uses_ratio", None), bool):
        raise ConfigError(
            f"algo.loss={name!r}: {type(loss).__name__} does not say whether its gradient is "
            "weighed by the ratio to old_logprobs; add `uses_ratio: ClassVar[bool] = True` "
            "(or False) to it"
        )
    return loss


def _run(token_loss: TokenLossFn, inputs: LossInput) -> TokenLoss:
    """Ask a loss for its tokens, and refuse what would be broadcast or carry no gradient.

    Raises:
        TrainingError: a loss of the user's raised, or returned something else than [M] tensors.
    """
    name = f"algo.loss: {type(token_loss).__name__}"
    with blamed(name, token_loss):
        found = token_loss(inputs)
    if not isinstance(found, TokenLoss):
        raise TrainingError(
            f"{name} returned {type(found).__name__}; return TokenLoss(loss, ratio, clipped)"
        )
    want = inputs.logprobs.shape
    for part in ("loss", "ratio", "clipped"):
        value = getattr(found, part)
        if not isinstance(value, Tensor) or value.shape != want:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TrainingError(
                f"{name} gave a {part} of {got}; each of loss, ratio and clipped is a tensor of "
                f"shape {tuple(want)}, one value for each trained token"
            )
    if inputs.logprobs.requires_grad and len(inputs.logprobs) and not found.loss.requires_grad:
        raise TrainingError(
            f"{name} gave a loss without a gradient; compute it from inputs.logprobs, not detached"
        )
    return found


def require(holds: bool, loss: object, setting: str, want: str) -> None:
    """Refuse a setting of a loss: for its ``__post_init__``.

    Raises:
        ConfigError: ``holds`` is False.
    """
    if not holds:
        raise ConfigError(
            f"algo.loss_kwargs.{setting}={getattr(loss, setting)!r}: {type(loss).__name__} needs "
            f"{want}"
        )
