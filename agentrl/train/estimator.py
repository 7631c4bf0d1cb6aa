"""Runs one advantage estimator, and refuses an answer that is no credit for its tokens."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.config import CreditConfig
from agentrl.algo.credit import Credit, CreditBatch, Estimator, get_estimator
from agentrl.algo.plug_in import blamed, is_own
from agentrl.errors import TrainingError


def run_estimator(batch: CreditBatch, config: CreditConfig) -> Credit:
    """Return what the estimator of ``config`` says of ``batch``; M is its number of tokens.

    A plug-in gets a copy, so that it can change nothing. One that did not ask for values sees
    none, also where another environment of the run has a critic.

    Returns:
        ``advantages``, float32 [M]; ``value_targets``, float32 [M], and ``value_mask``, bool [M],
        where the estimator reads values, else None.

    Raises:
        TrainingError: it gave something else than one finite number per token.
    """
    estimator, name = get_estimator(config.advantage), f"algo.advantage={config.advantage!r}"
    if "values" not in estimator.needs:
        batch = replace(batch, values=None, bootstrap_values=None)
    seen = batch if is_own(estimator) else copy.deepcopy(batch)
    with blamed(name, estimator):
        credit = estimator(seen, **estimator_kwargs(config))
    found = credit.advantages if isinstance(credit, Credit) else None
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.is_sparse:
        got = type(credit if found is None else found).__name__
        raise TrainingError(
            f"{name} returned {got}; return Credit(advantages), a tensor of one floating-point "
            f"number for each of the {batch.num_tokens} sampled tokens"
        )
    advantages = _one_per_token(found, batch.num_tokens, name, "advantages")
    targets, mask = _value_targets(credit, batch.num_tokens, estimator, name)
    return Credit(advantages, value_targets=targets, value_mask=mask)


def estimator_kwargs(config: CreditConfig) -> dict[str, Any]:
    """Return the estimator's arguments: its own, and the discounts where they are set."""
    discounts = {"gamma": config.gamma, "lam": config.lam}
    given = {name: value for name, value in discounts.items() if value is not None}
    return {**given, **config.advantage_kwargs}


def _value_targets(
    credit: Credit, num_tokens: int, estimator: Estimator, name: str
) -> tuple[Tensor | None, Tensor | None]:
    """Return what the critic is to predict, float32 [M], and where, bool [M]."""
    targets, mask = credit.value_targets, credit.value_mask
    if "values" not in estimator.needs:
        if targets is not None or mask is not None:
            raise TrainingError(
                f"{name} gave value targets, but there is no critic to learn them: declare that it "
                'reads one, @estimator(needs=("values",))'
            )
        return None, None
    if not isinstance(targets, Tensor) or not targets.is_floating_point() or targets.is_sparse:
        raise TrainingError(
            f"{name} reads values and gave value targets of type {type(targets).__name__}, so the "
            "critic would learn nothing; return Credit(advantages, value_targets=...), a tensor of "
            f"one floating-point number for each of the {num_tokens} sampled tokens"
        )
    if mask is None:
        mask = torch.ones(num_tokens, dtype=torch.bool)
    elif not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (num_tokens,):
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask)
        raise TrainingError(
            f"{name} gave a value mask of {got}; it is None, for all tokens, or bool of shape "
            f"({num_tokens},)"
        )
    return _one_per_token(targets, num_tokens, name, "value targets"), mask.cpu()


def _one_per_token(found: Tensor, num_tokens: int, name: str, what: str) -> Tensor:
    """Return ``found`` as float32 [M], without gradient."""
    if found.shape != (num_tokens,) or found.device.type != "cpu":
        raise TrainingError(
            f"{name} gave {what} of shape {tuple(found.shape)} on {found.device}; it returns one "
            f"number for each of the {num_tokens} sampled tokens, shape ({num_tokens},) on the cpu"
        )
    values = found.detach().float()
    if not bool(values.isfinite().all()):
        raise TrainingError(
            f"{name} gave {int((~values.isfinite()).sum())} {what} that are no finite float32 "
            f"numbers, of {num_tokens}; look at the sizes of rewards, weights and arguments"
        )
    return values
