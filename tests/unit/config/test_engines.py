"""How policy and critic are trained: what is refused, and what is not."""

from __future__ import annotations

import pytest

from agentrl.config.engines import policy_steps, uses_critic, warmup_problems
from agentrl.config.load import load
from agentrl.errors import ConfigError

ENV = "env.id=guess_number"
PPO = [ENV, "algo=ppo"]
MIX = "env.mix=[{id: guess_number, algo: {advantage: gae}}, {id: calculator}]"


def refusals(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides))
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=-1", "lr=-1.0: must be a finite number of at least 0"),
        ("lr=2", "lr=2.0: AdamW moves every weight by about the rate"),
        ("lr=1e-10", "lr=1e-10: weights are float32 (with KEY.precision=bf16 too)"),
        ("epochs=0", "epochs=0: must be at least 1"),
        ("tokens_per_micro_batch=0", "tokens_per_micro_batch=0: must be at least 1"),
        ("updates_per_step=257", "updates_per_step=257 is more than the 256 trajectories"),
        ("grad_clip=nan", "grad_clip=nan: must be a finite"),
        ("weight_decay=-1", "weight_decay=-1.0: must be"),
        ("min_lr_fraction=2", "min_lr_fraction=2.0: must be between 0 and 1"),
        ("betas=[0.9]", "betas=[0.9]: must be two numbers in [0, 1), for example KEY.betas="),
        ("eps=0", "eps=0.0: must be a finite number above 0"),
        ("warmup_steps=1000", "warmup_steps=1000 with"),
        (
            "sequence_parallel=2",
            "sequence_parallel=2: must divide the 1 rank of its pool; write",
        ),
        ("shard_size=2", "shard_size=2: must divide the 1 rank of its pool; write 1, or 0"),
    ],
)
def test_policy_and_critic_have_the_same_ranges(override: str, words: str) -> None:
    for key in ("actor", "critic"):
        (problem,) = refusals(*PPO, f"{key}.{override}")
        assert problem.startswith(f"{key}.{words.replace('KEY', key)}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("value_clip=0", "critic.value_clip=0.0: must be a finite number above 0, .* or null"),
        ("value_clip=inf", "critic.value_clip=inf: must be"),
        ("head_start_steps=-1", "critic.head_start_steps=-1: must be at least 0"),
        ("head_start_steps=20", "the policy would never move; use at most 19"),
        ("path=tiny", "critic.path=tiny: .*leave it out"),
        ("path=''", "critic.path='' is empty: .*critic.path=null"),
    ],
)
def test_what_a_critic_cannot_do_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load([*PPO, f"critic.{override}"])


def test_settings_at_the_edge_are_not_refused() -> None:
    for override in ("value_clip=null", "head_start_steps=19", "lr=0", "path=some/model"):
        assert uses_critic(load([*PPO, f"critic.{override}"]))


@pytest.mark.parametrize(
    "override", ["lr=1e-4", "epochs=3", "value_clip=null", "head_start_steps=1", "path=a/model"]
)
def test_a_setting_of_a_critic_that_no_estimator_reads_is_refused(override: str) -> None:
    (problem,) = refusals(ENV, f"critic.{override}")
    name = override.split("=")[0]
    assert problem.startswith(f"critic.{name}=") and "algo.advantage=grpo" in problem
    assert "choose algo=ppo, turn_ppo or bilevel" in problem


def test_recipes_of_a_critic_are_nobodys_choice_where_there_is_none() -> None:
    assert not uses_critic(load([ENV]))
    assert not uses_critic(load([ENV, "model.path=some/model"]))


def test_one_environment_of_a_mix_is_enough_for_a_critic() -> None:
    assert uses_critic(load([MIX, "critic.lr=1e-4"]))


def test_a_head_start_leaves_fewer_steps_to_the_policy() -> None:
    config = load([*PPO, "trainer.total_steps=8", "critic.head_start_steps=3"])
    assert policy_steps(config, total_steps=8) == 5
    assert policy_steps(load([ENV]), total_steps=8) == 8
    config.actor.warmup_steps = 10  # 5 steps of 2 updates
    (problem,) = warmup_problems(config, total_steps=8)
    assert "actor.warmup_steps=10 with 10 optimizer steps" in problem


def test_with_an_estimator_that_does_not_exist_only_its_name_is_refused() -> None:
    (problem,) = refusals(ENV, "algo.advantage=gea", "critic.lr=1e-4")
    assert problem.startswith("algo.advantage='gea'")
