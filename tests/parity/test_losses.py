"""Policy losses: values, and gradients by the log-probabilities."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.config import CorrectionConfig, CorrectionWeight, RejectConfig
from agentrl.algo.correction import correct
from agentrl.algo.loss import LOSSES, LossInput, make_loss
from tests.parity import our_side, verl_side
from tests.parity.bridge import Ragged, ragged
from tests.parity.our_side import NORM_TOKENS
from tests.parity.record import SEEDS, compare
from tests.parity.test_aggregate import MODES

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@dataclass(kw_only=True)
class Case:
    """One loss under the same settings on both sides."""

    ours: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    policy_loss: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def config(self) -> Any:
        """verl's."""
        config = verl_side.actor_config(policy_loss=self.policy_loss, **self.actor)
        config.global_batch_info["loss_scale_factor"] = NORM_TOKENS
        return config


CASES = {
    "vanilla": Case(ours=CLIP | {"dual_clip": 1.5}, actor={"clip_ratio_c": 1.5}),
    "gspo": Case(ours=CLIP),
    "gpg": Case(),
    "cispo": Case(ours=CLIP),
    "dro": Case(ours={"beta": 0.3}, policy_loss={"dro_beta": 0.3}),
    # Shares and bounds with which some tokens of a small batch are chosen.
    "clip_cov": Case(
        ours=CLIP | {"share": 0.1, "cov_low": 0.1, "cov_high": 5.0},
        policy_loss={"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0},
    ),
    "kl_cov": Case(
        ours={"share": 0.1, "kl_coef": 0.5},
        policy_loss={"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5},
    ),
    "dppo_tv": Case(
        ours={"tv_low": 0.1, "tv_high": 0.15, "max_ratio": 1.5},
        actor={"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.5},
    ),
    "dppo_kl": Case(
        ours={"kl_low": 0.02, "kl_high": 0.03, "max_ratio": 1.5},
        actor={"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.5},
    ),
}
"""Losses that honour the aggregation on both sides."""


def theirs(
    step: Ragged,
    name: str,
    case: Case,
    mode: str,
    *,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    old: str = "old_logprobs",
    seed: int = 0,
) -> tuple[float, Tensor]:
    """verl's loss and gradient, [N]; ``mask`` and ``weights`` are [B, T]."""
    torch.manual_seed(seed)  # clip_cov draws from the global generator
    loss, gradient = verl_side.policy_loss(
        name,
        step.fields[old],
        step.fields["logprobs"],
        step.fields["advantages"] if advantages is None else advantages,
        step.mask if mask is None else mask,
        mode,
        case.config,
        weights,
    )
    return loss, step.flat(gradient)


def is_weights(step: Ragged) -> Tensor:
    """Importance weights as a correction would give them: [B, T]."""
    log_ratio = step.fields["old_logprobs"] - step.fields["rollout_logprobs"]
    return log_ratio.exp().clamp(max=2.0) * step.maskf


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("name", CASES)
def test_losses(name: str, weighted: bool) -> None:
    case = CASES[name]
    loss = make_loss(name, case.ours)
    label = f"loss {name}, 5 modes" + (" x is_weights" if weighted else "")
    for seed in SEEDS:
        step = ragged(seed)
        weights = is_weights(step) if weighted else None
        flat = None if weights is None else step.flat(weights)
        mine = [our_side.policy_loss(step, loss, m, weights=flat, seed=seed) for m in MODES]
        verls = [theirs(step, name, case, m, weights=weights, seed=seed) for m in MODES]
        compare(label, torch.tensor([x for x, _ in mine]), torch.tensor([x for x, _ in verls]))
        compare(
            f"{label}: gradient",
            torch.stack([gradient for _, gradient in mine]),
            torch.stack([gradient for _, gradient in verls]),
        )
        assert verls[0][1].any(), "a gradient of zeros would prove nothing"


def token_losses(step: Ragged, name: str, settings: dict[str, Any]) -> Tensor:
    """Ours before aggregation: [B, T]."""
    row = torch.arange(len(step.mask))[:, None].expand_as(step.mask)
    inputs = LossInput(
        logprobs=step.sampled(step.fields["logprobs"]),
        old_logprobs=step.sampled(step.fields["old_logprobs"]),
        advantages=step.sampled(step.fields["advantages"]),
        row=step.sampled(row),
        num_rows=len(step.mask),
    )
    return step.padded(make_loss(name, settings)(inputs).loss)


SAPO = Case(ours={"tau_pos": 1.0, "tau_neg": 1.05}, actor={"tau_pos": 1.0, "tau_neg": 1.05})


def test_sapo_in_its_own_mode() -> None:
    for seed in SEEDS:
        step = ragged(seed)
        mode = "seq-mean-token-mean"
        got = our_side.policy_loss(step, make_loss("sapo", SAPO.ours), mode)
        want = theirs(step, "sapo", SAPO, mode)
        compare("loss sapo", got[0], want[0])
        compare("loss sapo: gradient", got[1], want[1])


def test_sapo_honours_the_mode() -> None:
    """Where we differ: verl's sapo is seq-mean-token-mean whatever is configured, without a word.

    A setting that is read by nothing hides a mistake; here every loss honours every mode.
    """
    for seed in SEEDS:
        step, mode = ragged(seed), MODES[seed % 4]  # in turn, without its own
        fixed = theirs(step, "sapo", SAPO, "seq-mean-token-mean")
        ignored = theirs(step, "sapo", SAPO, mode)
        assert ignored[0] == fixed[0]
        assert torch.equal(ignored[1], fixed[1])
        got = our_side.policy_loss(step, make_loss("sapo", SAPO.ours), mode)
        aggregated = verl_side.core.agg_loss(
            token_losses(step, "sapo", SAPO.ours), step.maskf, mode, loss_scale_factor=NORM_TOKENS
        )
        compare("loss sapo, other modes (verl: one mode)", got[0], aggregated)


GMPO = Case(
    ours={"clip_low": 0.2, "clip_high": 0.28},
    actor={"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
)


def row_advantages(step: Ragged) -> Tensor:
    """One advantage per row, as outcome estimators give it: [B, T]."""
    return step.fields["advantages"][:, :1].expand_as(step.mask).contiguous()


def test_geo_mean_with_one_advantage_per_row() -> None:
    """verl's mean is over all rows, ours over those with a token."""
    mode = "seq-mean-token-mean"
    for seed in SEEDS:
        step = ragged(seed)
        advantages, share = row_advantages(step), 1 - float(step.empty.float().mean())
        got = our_side.policy_loss(
            step, make_loss("geo_mean", GMPO.ours), mode, advantages=advantages
        )
        want = theirs(step, "geo_mean", GMPO, mode, advantages=advantages)
        name = "loss geo_mean (verl counts empty rows)"
        compare(name, got[0] * share, want[0])
        compare(f"{name}: gradient", got[1] * share, want[1])


def test_geo_mean_honours_mode_and_weights_per_token() -> None:
    """Where we differ: verl's geo_mean ignores the mode and the number of rows of the whole
    mini-batch, so that its gradient depends on how a mini-batch is cut into micro-batches: the mean
    of two micro-batches of unequal size is not the mean of the whole. Ours is a sum of weighted
    token losses like any other. Importance weights that are equal along a row agree."""
    cut_matters = 0
    for seed in SEEDS:
        step = ragged(seed, empty=False)
        advantages = row_advantages(step)
        whole = theirs(step, "geo_mean", GMPO, "token-mean", advantages=advantages)
        fixed = theirs(step, "geo_mean", GMPO, "seq-mean-token-sum", advantages=advantages)
        assert whole[0] == fixed[0], "verl reads no mode"
        parts = [
            verl_side.policy_loss(
                "geo_mean",
                step.fields["old_logprobs"][rows],
                step.fields["logprobs"][rows],
                advantages[rows],
                step.mask[rows],
                "token-mean",
                GMPO.config,
            )[0]
            for rows in (slice(0, 1), slice(1, None))
        ]
        cut_matters += abs(sum(parts) / 2 - whole[0]) > 1e-3
        per_row = is_weights(step)[:, :1].clamp(min=0.5).expand_as(step.mask).contiguous()
        loss = make_loss("geo_mean", GMPO.ours)
        mode = "seq-mean-token-mean"
        got = our_side.policy_loss(
            step, loss, mode, advantages=advantages, weights=step.flat(per_row)
        )
        want = theirs(step, "geo_mean", GMPO, mode, advantages=advantages, weights=per_row)
        compare("loss geo_mean x is_weights of rows", got[0], want[0])
        compare("loss geo_mean x is_weights of rows: gradient", got[1], want[1])
    assert cut_matters > len(SEEDS) // 2


def test_geo_mean_keeps_the_credit_of_a_token() -> None:
    """Where we differ: verl averages the advantages of a row, so that credit per turn is lost.

    A row whose second half earned the opposite of its first has mean advantage 0: verl gives it no
    gradient at all. Ours pushes the first half up and the second down.
    """
    step = ragged(3, empty=False)
    advantages = torch.zeros(step.mask.shape)
    for row, sampled in enumerate(step.mask):
        where = sampled.nonzero().squeeze(1)
        half = len(where) // 2
        advantages[row, where[:half]] = 1.0
        advantages[row, where[half : 2 * half]] = -1.0
    mode = "seq-mean-token-mean"
    _, lost = theirs(step, "geo_mean", GMPO, mode, advantages=advantages)
    assert float(lost.abs().max()) < 1e-6
    _, kept = our_side.policy_loss(
        step, make_loss("geo_mean", GMPO.ours), mode, advantages=advantages
    )
    assert float(kept.abs().max()) > 1e-3


def test_reinforce_is_verls_bypass_without_correction() -> None:
    bypass = Case(
        policy_loss={"rollout_correction": {"rollout_is": None, "loss_type": "reinforce"}}
    )
    for seed in SEEDS:
        step = ragged(seed)
        got = our_side.policy_loss(step, make_loss("reinforce", {}), "token-mean")
        want = theirs(step, "bypass_mode", bypass, "token-mean", old="rollout_logprobs")
        compare("loss reinforce", got[0], want[0])
        compare("loss reinforce: gradient", got[1], want[1])


RULES = (
    RejectConfig(statistic="token_k1", low=0.5, high=2.5),
    RejectConfig(statistic="seq_mean_k3", high=0.15),
)
RULES_OF_VERL = {
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.5_2.5,0.15",
}
BYPASS = {
    "ppo_clip": ("vanilla", CLIP | {"dual_clip": 3.0}, False),
    "reinforce": ("reinforce", {}, True),
}
"""verl's type -> our loss, its settings, whether it is multiplied by importance weights."""


@pytest.mark.parametrize("weight", ["token", "sequence"])
@pytest.mark.parametrize("kind", BYPASS)
def test_bypass(kind: str, weight: str) -> None:
    """Two policies: the present one against the engine's, corrected before each mini-batch."""
    name, settings, weighted = BYPASS[kind]
    case = Case(
        policy_loss={
            "rollout_correction": {
                "rollout_is": weight,
                "rollout_is_threshold": 1.5,
                "loss_type": kind,
                **RULES_OF_VERL,
            }
        }
    )
    config = CorrectionConfig(weight=CorrectionWeight(weight), upper=1.5, reject=list(RULES))
    for seed in SEEDS:
        step = ragged(seed)
        found = correct(
            step.flat(step.fields["logprobs"]),
            step.flat(step.fields["rollout_logprobs"]),
            step.flat(step.mask),
            step.session_of_token,
            config,
        )
        if not bool(found.keep.any()):
            continue  # NaN in verl, see test_aggregate
        mode = MODES[seed % len(MODES)]  # in turn
        got = our_side.policy_loss(
            step,
            make_loss(name, settings),
            mode,
            old="rollout_logprobs",
            mask=found.keep,
            weights=found.weights if weighted else None,
        )
        want = theirs(step, "bypass_mode", case, mode, old="rollout_logprobs")
        compare(f"bypass {kind}, {weight}", got[0], want[0])
        compare(f"bypass {kind}, {weight}: gradient", got[1], want[1])


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_decoupled(weight: str) -> None:
    """Three policies: the old one against the engine's, once a step; the loss clips by its own."""
    config = CorrectionConfig(weight=CorrectionWeight(weight), upper=1.5, reject=list(RULES))
    case = CASES["vanilla"]
    for seed in SEEDS:
        step = ragged(seed)
        found = correct(
            step.flat(step.fields["old_logprobs"]),
            step.flat(step.fields["rollout_logprobs"]),
            step.flat(step.mask),
            step.session_of_token,
            config,
        )
        proto, mask, _ = verl_side.correction.compute_rollout_correction_and_rejection_mask(
            old_log_prob=step.fields["old_logprobs"],
            rollout_log_prob=step.fields["rollout_logprobs"],
            response_mask=step.maskf,
            rollout_is=weight,
            rollout_is_threshold=1.5,
            **RULES_OF_VERL,
        )
        if not bool(found.keep.any()):
            continue  # NaN in verl, see test_aggregate
        got = our_side.policy_loss(
            step,
            make_loss("vanilla", case.ours),
            "token-mean",
            mask=found.keep,
            weights=found.weights,
        )
        want = theirs(
            step,
            "vanilla",
            case,
            "token-mean",
            mask=mask.bool(),
            weights=proto.batch["rollout_is_weights"],
        )
        compare(f"decoupled vanilla, {weight}", got[0], want[0])
        compare(f"decoupled vanilla, {weight}: gradient", got[1], want[1])


def test_every_loss_of_verl_is_here() -> None:
    named = set(verl_side.core.POLICY_LOSS_REGISTRY) - {"bypass_mode"}
    assert named <= set(LOSSES.names())
    assert named <= CASES.keys() | {"sapo", "geo_mean"}
