"""KL(policy || reference) from the log-probabilities of sampled tokens, and how much it weighs.

With ``d = log pi - log pi_ref``: ``k1 = d`` (unbiased, high variance), ``k2 = d^2 / 2`` (its
gradient is that of the KL), ``k3 = e^-d + d - 1`` (unbiased, low variance, never negative), see
http://joschu.net/blog/kl-approx.html. As a term of a loss only ``k2`` has the right gradient: the
mean gradient of ``k1`` is 0, that of ``k3`` belongs to KL(reference || policy). A ``+`` keeps the
value of an estimate and takes the gradient of ``k2``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from agentrl.errors import CheckpointError, ConfigError, TrainingError

logger = logging.getLogger(__name__)

KL_KINDS: dict[str, str] = {
    "k1": "d",
    "k2": "d^2 / 2",
    "k3": "e^-d + d - 1",
    "abs": "|d|",
    "k1+": "value of k1, gradient of k2",
    "k3+": "value of k3, gradient of k2",
    "abs+": "value of abs, gradient of k2",
}
"""Name -> formula."""

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to this on both sides before they are exponentiated."""
K3_LIMIT = 10.0
"""k3 of a single token is clamped to this."""
MAX_RELATIVE_ERROR = 0.2
"""An adaptive coefficient takes no KL for further from its target than this share of it."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Return one estimate per token, float32, of the shape of the inputs, with gradient.

    Raises:
        ValueError: ``kind`` is none of :data:`KL_KINDS`.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimate {kind!r}; known: {', '.join(KL_KINDS)}")
    difference = logprobs.float() - ref_logprobs.float()
    if kind.endswith("+"):
        gradient = 0.5 * difference.square()
        return _estimate(difference.detach(), kind[:-1]) + (gradient - gradient.detach())
    return _estimate(difference, kind)


def _estimate(difference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ((-clamped).exp() + clamped - 1).clamp(-K3_LIMIT, K3_LIMIT)


class KLController:
    """The weight of the KL: fixed, or steered to a target (arXiv 1909.08593, section 2.2).

    Adaptive: ``value *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sessions / horizon``.

    Args:
        coef: weight to start with.
        target: KL per token to steer to; None keeps the weight.
        horizon: sessions over which the weight reacts.

    Raises:
        ConfigError: settings that cannot work.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10_000) -> None:
        if not 0 <= coef < math.inf:
            raise ConfigError(f"algo.kl.coef={coef}: must be 0 or a positive number")
        if target is not None and not 0 < target < math.inf:
            raise ConfigError(
                f"algo.kl.target={target}: must be a positive KL per token, or null to keep coef"
            )
        if target is not None and coef == 0:
            raise ConfigError(
                f"algo.kl.target={target} with algo.kl.coef=0: a weight of 0 stays 0 however it is "
                "scaled; start with a positive coef, such as 0.001"
            )
        if horizon < 1:
            raise ConfigError(f"algo.kl.horizon={horizon}: must be 1 session or more")
        self._coef = float(coef)
        self.value = self._coef
        """Weight of the KL now."""
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_sessions: int) -> None:
        """Adapt the weight after a step.

        Args:
            kl: mean per token over the step.
            num_sessions: how many it was measured on; more than ``horizon`` count as ``horizon``,
                so that one step cannot turn the sign of the weight.

        Raises:
            TrainingError: the KL is not finite.
        """
        if self._target is None:
            return
        if not math.isfinite(kl):
            raise TrainingError(
                f"the KL to the reference policy is {kl}, to which its coefficient cannot adapt; "
                "look for log-probabilities that are not finite"
            )
        error = min(max(kl / self._target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.value *= 1 + error * min(num_sessions / self._horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs."""
        return {"value": self.value, "coef": self._coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`. A weight that nothing adapts is the configuration's.

        So is one that was steered from another ``coef`` than the present one: whoever changes it
        wants to start from it.

        Raises:
            CheckpointError: the state holds no usable weight.
        """
        value = state.get("value")
        if not isinstance(value, float) or not 0 <= value < math.inf:
            raise CheckpointError(f"the checkpoint's KL coefficient is {value!r}: not a weight")
        coef = state.get("coef")
        if not isinstance(coef, float):
            raise CheckpointError(
                f"the checkpoint's KL coefficient began at {coef!r}: not a weight"
            )
        if self._target is None:
            return
        if coef != self._coef:
            logger.warning(
                "algo.kl.coef was %g and is now %g: the KL coefficient starts again from it, not "
                "from the %g that it had come to",
                coef,
                self._coef,
                value,
            )
            return
        self.value = value
