"""Settings of the algorithm: what is refused with which words, and the neighbours that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.keys import config_dir
from agentrl.config.load import load
from agentrl.dist.config import CriticConfig
from agentrl.errors import ConfigError

ENV = "env.id=guess_number"
PRESETS = sorted(path.stem for path in (config_dir() / "algo").glob("*.yaml"))
WITH_CRITIC = {"ppo": "gae", "turn_ppo": "turn_gae", "bilevel": "bilevel_gae"}


def refusals(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([ENV, *overrides])
    return str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_ready_to_run(name: str) -> None:
    assert load([ENV, f"algo={name}"]).algo.advantage


@pytest.mark.parametrize(("name", "estimator"), WITH_CRITIC.items())
def test_a_preset_with_a_critic_needs_one_sample_of_a_prompt(name: str, estimator: str) -> None:
    config = load([ENV, f"algo={name}", "rollout.n=1", "algo.gamma=0.9", "algo.lam=0.5"])
    assert (config.algo.advantage, config.algo.gamma, config.algo.lam) == (estimator, 0.9, 0.5)
    assert config.critic.lr > 1e-4, "the recipe of the embedded model"
    pretrained = load([ENV, f"algo={name}", "model.path=some/model"]).critic
    assert (pretrained.lr, pretrained.epochs) == (CriticConfig().lr, 1)


# Overrides; what the message says, in order; the nearest thing that is meant and works.
CASES: list[tuple[list[str], list[str], list[str]]] = [
    # Estimators and their arguments.
    (
        ["algo.advantage=gpro"],
        ["algo.advantage='gpro'", "did you mean 'grpo'", "known: bilevel_gae"],
        ["algo.advantage=grpo"],
    ),
    (
        ["algo.advantage='json:dumps_'"],
        ["algo.advantage='json:dumps_'", "has no 'dumps_'; did you mean", "dumps"],
        ["algo.advantage='agentrl.algo.turns:turn_return'"],
    ),
    (
        ["algo.advantage='math:pi'"],
        ["algo.advantage='math:pi'", "is float, no function: give estimate(batch"],
        ["algo.advantage='agentrl.algo.group_baselines:grpo'"],
    ),
    (
        ["algo.advantage_kwargs.normalise_std=false"],
        ["algo.advantage_kwargs.normalise_std: grpo takes no", "did you mean 'normalize_std'"],
        ["algo.advantage_kwargs.normalize_std=false"],
    ),
    (
        ["algo.advantage_kwargs.normalize_std=1"],
        ["algo.advantage_kwargs.normalize_std: grpo takes bool, got 1"],
        ["algo.advantage_kwargs.normalize_std=true"],
    ),
    (
        ["algo=gigpo", "algo.advantage_kwargs.step_weight=inf"],
        ["algo.advantage_kwargs.step_weight=inf: must be a finite number"],
        ["algo=gigpo", "algo.advantage_kwargs.step_weight=0.5"],
    ),
    (
        ["algo.gamma=0.9"],
        ["algo.gamma=0.9: grpo takes no gamma", "it takes: normalize_std", "algo.gamma=null"],
        ["algo.advantage=turn_return", "algo.gamma=0.9"],
    ),
    (
        ["algo=turn_return", "algo.lam=0.9"],
        ["algo.lam=0.9: turn_return takes no lam", "algo.lam=null"],
        ["algo=turn_return", "algo.lam=null"],
    ),
    (
        ["algo=turn_return", "algo.gamma=1.5"],
        ["algo.gamma=1.5: must be between 0 and 1"],
        ["algo=turn_return", "algo.gamma=1"],
    ),
    (
        ["algo=turn_return", "algo.gamma=nan"],
        ["algo.gamma=nan: must be between 0 and 1"],
        ["algo=turn_return", "algo.gamma=0"],
    ),
    (
        ["algo=turn_return", "algo.advantage_kwargs.gamma=99"],
        ["algo.advantage_kwargs.gamma=99: must be between 0 and 1"],
        ["algo=turn_return", "algo.advantage_kwargs.gamma=0.99"],
    ),
    (
        ["algo=turn_return", "algo.gamma=0.9", "algo.advantage_kwargs.gamma=0.9"],
        ["algo.gamma and algo.advantage_kwargs.gamma: set one of them"],
        ["algo=turn_return", "algo.gamma=0.9"],
    ),
    # What estimators are fed.
    (
        ["rollout.n=1"],
        ["rollout.n=1 with algo.advantage=grpo", "no baseline", "at least 2"],
        ["rollout.n=1", "algo=reinforce_pp"],
    ),
    (
        ["algo.advantage=tree"],
        ["algo.advantage=tree needs episodes that branch", "rollout.tree.rounds above 0"],
        ["algo.advantage=tree", "rollout.tree.rounds=1"],
    ),
    (
        ["rollout.tree.rounds=1"],
        ["rollout.tree.rounds=1 with algo.advantage=grpo", "independent", "algo.advantage=tree"],
        ["rollout.tree.rounds=0"],
    ),
    # Rewards.
    (
        ["algo.reward_weights.turn=nan"],
        ["algo.reward_weights.turn=nan: must be a finite number"],
        ["algo.reward_weights.turn=0.5"],
    ),
    (
        ["algo.reward_weights={outcome: 0, turn: 0, tool: 0}"],
        ["algo.reward_weights={'outcome': 0.0", "every weight is 0, so no reward is left"],
        ["algo.reward_weights={outcome: 0, turn: 1, tool: 0}"],
    ),
    (
        ["reward.parts=[{id: format, kwargs: {pattern: a}}]", "algo.reward_weights.fromat=1"],
        ["algo.reward_weights.fromat=1.0", "did you mean format?", "outcome, turn, tool, format"],
        [
            "reward.parts=[{id: env}, {id: format, weight: 0, kwargs: {pattern: a}}]",
            "algo.reward_weights.format=1",
        ],
    ),
    (
        ["reward.parts=[{id: format, kwargs: {pattern: a}}]", "algo.reward_weights.format=1"],
        [
            "algo.reward_weights.format=1.0 with outcome=1.0",
            "count twice",
            "algo.reward_weights.outcome=0",
        ],
        [
            "reward.parts=[{id: format, kwargs: {pattern: a}}]",
            "algo.reward_weights={format: 1, outcome: 0}",
        ],
    ),
    # The loss.
    (
        ["algo.loss=vanila"],
        ["algo.loss='vanila'", "did you mean 'vanilla'"],
        ["algo.loss=vanilla"],
    ),
    (
        ["algo.loss_kwargs.clip_hi=0.3"],
        ["algo.loss_kwargs.clip_hi: Vanilla takes no", "did you mean 'clip_high'"],
        ["algo.loss_kwargs.clip_high=0.3"],
    ),
    (
        ["algo.loss_kwargs.clip_low=big"],
        ["algo.loss_kwargs.clip_low: Vanilla takes float, got 'big'"],
        ["algo.loss_kwargs.clip_low=0.1"],
    ),
    (
        ["algo.loss_kwargs.clip_low=1.5"],
        ["algo.loss_kwargs.clip_low=1.5: Vanilla needs", "at most 1"],
        ["algo.loss_kwargs.clip_low=1"],
    ),
    (
        ["algo.loss_kwargs.clip_high=inf"],
        ["algo.loss_kwargs.clip_high=inf: must be a finite number"],
        ["algo.loss_kwargs.clip_high=1e6"],
    ),
    (
        ["algo.loss_kwargs.dual_clip=1"],
        ["algo.loss_kwargs.dual_clip=1: Vanilla needs a ratio above 1, or null"],
        ["algo.loss_kwargs.dual_clip=null"],
    ),
    (
        ["algo.loss=dro"],
        ["algo.loss_kwargs: DRO needs beta; set algo.loss_kwargs.beta="],
        ["algo.loss=dro", "algo.loss_kwargs.beta=0.05"],
    ),
    (
        ["algo.loss=gspo", "algo.loss_kwargs={clip_low: 0, clip_high: 4e-4}"],
        ["algo.loss_kwargs.clip_low=0: GSPO needs", "above 0"],
        ["algo.loss=gspo", "algo.loss_kwargs={clip_low: 3e-4, clip_high: 4e-4}"],
    ),
    (
        ["algo.loss_agg=token_mean"],
        ["algo.loss_agg='token_mean' is unknown", "did you mean token-mean"],
        ["algo.loss_agg=turn-mean"],
    ),
    (
        ["algo.loss_agg_tokens=100"],
        ["algo.loss_agg_tokens=100 is read by algo.loss_agg=seq-mean-token-sum-norm only"],
        ["algo.loss_agg_tokens=100", "algo.loss_agg=seq-mean-token-sum-norm"],
    ),
    (
        ["algo.loss_agg_tokens=0", "algo.loss_agg=seq-mean-token-sum-norm"],
        ["algo.loss_agg_tokens=0: must be from 1 to"],
        ["algo.loss_agg_tokens=1", "algo.loss_agg=seq-mean-token-sum-norm"],
    ),
    (
        ["algo.entropy_coef=inf"],
        ["algo.entropy_coef=inf: must be a finite number"],
        ["algo.entropy_coef=0.01"],
    ),
    # KL to the reference. That it acts in one place is in the type of `where`.
    (
        ["algo.kl.coef=1e-3", "algo.kl.where=both"],
        ["algo.kl.where", "both", "loss, reward"],
        ["algo.kl.coef=1e-3", "algo.kl.where=reward"],
    ),
    (["algo.kl.coef=-1"], ["algo.kl.coef=-1.0: must be", "1e-3"], ["algo.kl.coef=0"]),
    (
        ["algo.kl.kind=k4"],
        ["algo.kl.kind='k4' is unknown; known: k1, k2, k3"],
        ["algo.kl.kind=k2"],
    ),
    (
        ["algo.kl.coef=1e-3", "algo.kl.kind=k1"],
        ["algo.kl.kind=k1 with algo.kl.where=loss", "gradient is 0 in the mean", "k1+"],
        ["algo.kl.coef=1e-3", "algo.kl.kind='k1+'"],
    ),
    (
        ["algo.kl.coef=1e-3", "algo.kl.where=reward", "algo.kl.kind='k3+'"],
        ["algo.kl.kind=k3+ with algo.kl.where=reward", "write k3"],
        ["algo.kl.coef=1e-3", "algo.kl.where=reward", "algo.kl.kind=k1"],
    ),
    (
        ["algo.kl.target=0.1"],
        ["algo.kl.target=0.1 with algo.kl.coef=0", "start from 1e-3"],
        ["algo.kl.target=0.1", "algo.kl.coef=1e-3"],
    ),
    (
        ["algo.kl.target=0", "algo.kl.coef=1e-3"],
        ["algo.kl.target=0.0: must be a finite number above 0"],
        ["algo.kl.target=null", "algo.kl.coef=1e-3"],
    ),
    (
        ["algo.kl.coef=1e-3", "algo.kl.horizon=100"],
        ["algo.kl.horizon=100 without algo.kl.target"],
        ["algo.kl.coef=1e-3", "algo.kl.horizon=100", "algo.kl.target=0.1"],
    ),
    (
        ["algo.kl.coef=1e-3", "algo.kl.horizon=0", "algo.kl.target=0.1"],
        ["algo.kl.horizon=0: must be at least 1"],
        ["algo.kl.coef=1e-3", "algo.kl.horizon=1", "algo.kl.target=0.1"],
    ),
    # Correction of the mismatch.
    (
        ["algo.correction.weight=token"],
        [
            "algo.correction.weight=token with algo.old_logprobs=rollout",
            "counted twice",
            "algo.old_logprobs=recompute",
        ],
        ["algo.correction.weight=token", "algo.old_logprobs=recompute"],
    ),
    (
        ["algo.correction.weight=sequence", "algo.loss=cispo"],
        ["algo.correction.weight=sequence", "the ratio of cispo", "algo.loss=reinforce"],
        ["algo.correction.weight=sequence", "algo.loss=reinforce"],
    ),
    (
        ["algo.correction.lower=0.5"],
        ["algo.correction.lower=0.5 with algo.correction.weight=none", "token, sequence or"],
        [
            "algo.correction.lower=0.5",
            "algo.correction.weight=token",
            "algo.old_logprobs=recompute",
        ],
    ),
    (
        ["algo.correction.normalize=true"],
        ["algo.correction.normalize=True with algo.correction.weight=none"],
        ["algo.correction.normalize=false"],
    ),
    (
        [
            "algo.correction={weight: token, lower: 3, upper: 2}",
            "algo.old_logprobs=recompute",
        ],
        ["algo.correction.lower=3.0: must be above 0 and at most upper=2.0"],
        [
            "algo.correction={weight: token, lower: 0.5, upper: 2}",
            "algo.old_logprobs=recompute",
        ],
    ),
    (
        ["algo.correction.reject=[{statistic: seq_mean_k9, high: 2}]"],
        ["algo.correction.reject, 'seq_mean_k9': no such statistic; known: token_k1"],
        ["algo.correction.reject=[{statistic: seq_mean_k1, high: 2}]"],
    ),
    # Choice of groups.
    (
        ["algo=reinforce_pp", "algo.groups.refill=true"],
        ["algo.groups.refill=true with algo.advantage=reinforce_plus_plus", "or use grpo"],
        ["algo=dapo"],
    ),
    (
        ["algo=remax", "algo.groups.variance_top_p=0.5"],
        ["algo.groups.variance_top_p=0.5 with algo.advantage=remax", "or use grpo"],
        ["algo=rloo", "algo.groups.variance_top_p=0.5"],
    ),
    (
        ["algo.groups.variance_top_p=0"],
        ["algo.groups.variance_top_p=0.0: must be above 0 and at most 1"],
        ["algo.groups.variance_top_p=1"],
    ),
    (
        ["algo=dapo", "algo.groups.drop_zero_advantage=false"],
        ["refill=true with algo.groups.drop_zero_advantage=false", "leave one of the two out"],
        ["algo.groups.drop_zero_advantage=false"],
    ),
    (
        ["algo=dapo", "algo.groups.max_refills=0"],
        ["algo.groups.max_refills=0: must be at least 1", "algo.groups.refill=false"],
        ["algo=dapo", "algo.groups.max_refills=1"],
    ),
    (
        ["algo.groups.max_refills=8"],
        ["algo.groups.max_refills=8 without algo.groups.refill"],
        ["algo.groups.max_refills=8", "algo.groups.refill=true"],
    ),
]


@pytest.mark.parametrize(("wrong", "words", "right"), CASES, ids=[" ".join(c[0]) for c in CASES])
def test_a_wrong_setting_is_refused_with_key_value_and_fix_and_its_neighbour_is_not(
    wrong: list[str], words: list[str], right: list[str]
) -> None:
    message = refusals(*wrong)
    place = 0
    for word in words:
        assert word in message[place:], f"{word!r} is not there, or not in this order: {message}"
        place = message.index(word, place)
    load([ENV, *right])


def test_a_plug_in_names_its_batch_as_it_likes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def estimate(b, *, scale: float = 1.0): ...\n\ndef nothing(): ...\n")
    load([ENV, f"algo.advantage='{file}:estimate'", "algo.advantage_kwargs.scale=2"])
    message = refusals(f"algo.advantage='{file}:estimate'", "algo.advantage_kwargs.scal=2")
    assert "estimate takes no such argument; did you mean 'scale'? it takes: scale" in message
    assert "a function of a batch" in refusals(f"algo.advantage='{file}:nothing'")


def test_a_loss_of_ones_own_that_cannot_be_made_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Loss:\n    uses_ratio = True\n    def __init__(self, power: int = 1):\n"
        "        if power > 2: raise ValueError('too much power')\n"
        "class Silent: ...\n"
    )
    load([ENV, f"algo.loss='{file}:Loss'", "algo.loss_kwargs.power=2"])
    message = refusals(f"algo.loss='{file}:Loss'", "algo.loss_kwargs.power=3")
    assert "the constructor raised ValueError: too much power" in message
    assert "algo.loss_kwargs={'power': 3}" in message
    assert "does not say whether" in refusals(f"algo.loss='{file}:Silent'")


def test_a_part_that_another_one_may_give_is_left_to_the_first_episode(tmp_path: Path) -> None:
    function = ["reward.path='./score.py:grade'", "algo.reward_weights={outcome: 0, turn: 0}"]
    load([ENV, *function, "algo.reward_weights={score/style: 1}"])
    load([ENV, *function, "algo.reward_weights.elegance=1"])
    assert "did you mean score?" in refusals(*function, "algo.reward_weights.scroe=1")


def test_an_estimator_that_every_environment_of_a_mix_replaces_is_not_judged() -> None:
    entries = "{id: a, algo: {advantage: reinforce_plus_plus}}, {id: b, algo: {advantage: remax}}"
    load([f"env.mix=[{entries}]", "rollout.n=1"])
    with pytest.raises(ConfigError, match=r"rollout.n=1 with algo.advantage=grpo"):
        load([f"env.mix=[{entries}, {{id: c}}]", "rollout.n=1"])


def test_groups_of_a_mix_are_refilled_only_where_each_estimator_compares_them() -> None:
    entries = "{id: a}, {id: b, algo: {advantage: reinforce_plus_plus}}"
    with pytest.raises(ConfigError, match=r"with env.mix\[1\].algo.advantage=reinforce_plus_plus"):
        load([f"env.mix=[{entries}]", "algo.groups.refill=true"])


def test_every_problem_of_an_algorithm_is_named_at_once() -> None:
    message = refusals("algo.advantage=gpro", "algo.loss=vanila", "algo.kl.coef=-1")
    for key in ("algo.advantage", "algo.loss", "algo.kl.coef"):
        assert any(line.startswith(key) for line in message.splitlines())
