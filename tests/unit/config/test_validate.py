"""Each message names the key, what was got, and what would be right."""

from __future__ import annotations

import pytest

from agentrl.config.load import load
from agentrl.errors import ConfigError

ENV = "env.id=guess_number"


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (
            ["rollout.tree.rounds=1", "rollout.n=3", "algo.advantage=tree"],
            r"rollout.n=3 .*every tree and every round needs a branch; raise.*at least 4",
        ),
        (
            ["rollout.tree.trunks=3"],
            r"rollout.tree.trunks=3 with rollout.tree.rounds=0.*set rollout.tree.rounds to",
        ),
        (["rollout.temperature=0"], r"rollout.temperature=0.0.*eval.temperature=0"),
        (["rollout.top_p=0.9"], r"rollout.top_p=0.9.*importance ratio.*top_p=1"),
        (["rollout.top_k=50"], r"rollout.top_k=50.*top_k=0"),
        (["rollout.max_turns=0"], r"rollout.max_turns=0: must be"),
        (["rollout.max_turns=-1"], r"rollout.max_turns=-1: must be"),
        (["rollout.trajectory_timeout_s=0"], r"trajectory_timeout_s=0.0"),
        (["rollout.max_turn_tokens=5000"], r"max_turn_tokens=5000 .*max_response_tokens=512"),
        (["rollout.max_response_tokens=2048"], r"no room for a prompt.*max_context_tokens=768"),
        (
            ["trainer.prompts_per_step=1", "rollout.n=2", "actor.updates_per_step=3"],
            r"updates_per_step=3 is more than the 2 trajectories.*at most 2",
        ),
        (["actor.lr=-1"], r"actor.lr=-1.0: must be a finite number of at least 0"),
        (["actor.lr=nan"], r"actor.lr=nan: must be a finite"),
        (["actor.lr=inf"], r"actor.lr=inf: must be a finite"),
        (["algo.loss_agg=token_mean"], r"did you mean token-mean"),
        (["rollout.engine.id=vlm"], r"rollout.engine.id='vlm' is unknown; did you mean vllm\?"),
        (["model.tool_parser=hermess"], r"did you mean hermes"),
        (
            ["model.chat_template=a.jinja"],
            r"chat_template='a.jinja' with model.path=tiny: .*leave it out, or name another model",
        ),
        (["telemetry.trackers=[tensorbord]"], r"did you mean tensorboard"),
        (["cluster.kind=slurm"], r"cluster.kind='slurm' is unknown; known: local"),
        (["rollout.temperature=0.001"], r"rollout.temperature=0.001.*at least 0.01"),
        (["rollout.temperature=nan"], r"rollout.temperature=nan"),
        (["rollout.n=1000000000"], r"rollout.n=1000000000: must be at most 4096"),
        (["rollout.max_context_tokens=10000001"], r"must be at most 10000000"),
        (["trainer.prompts_per_step=1000001"], r"must be at most 1000000"),
        (["trainer.num_threads=100000"], r"trainer.num_threads=100000: must be at most 1024"),
        (["trainer.seed=-1"], r"trainer.seed=-1: must be between 0"),
        ([f"trainer.seed={2**63}"], r"trainer.seed"),
        (["trainer.run_dir=''"], r"trainer.run_dir='' is empty: give a directory"),
        (["trainer.resume=''"], r"trainer.resume='' is empty: give a directory"),
        (["model.warm_start.steps=0"], r"model.warm_start.steps=0: must be at least 1"),
        (["model.warm_start.episodes_per_step=0"], r"episodes_per_step=0: must be at least 1"),
        (["model.warm_start.episodes_per_step=65537"], r"must be at most 65536"),
        (["model.warm_start.lr=nan"], r"model.warm_start.lr=nan: must be a finite"),
        (["model.warm_start.vocab_size=100"], r"vocab_size=100: must be between"),
        (["model.warm_start.vocab_size=65537"], r"vocab_size=65537: must be between"),
        (["model.warm_start.seed=-1"], r"model.warm_start.seed=-1: must be between 0"),
        (["model.device=gpu"], r"model.device='gpu': write auto, cpu, cuda or cuda:N"),
        (["model.device='cuda:x'"], r"model.device='cuda:x': write"),
        (["env.processes=0"], r"env.processes=0: must be at least 1"),
        (["actor.betas=[0.9,1.0]"], r"actor.betas=\[0.9, 1.0\]: must be two numbers"),
        (["actor.betas=[0.9]"], r"actor.betas"),
        (["actor.betas=[nan,0.9]"], r"actor.betas=.*must be two numbers"),
        (["actor.eps=0"], r"actor.eps=0.0: must be a finite number above 0"),
        (["actor.eps=inf"], r"actor.eps=inf"),
        (["actor.min_lr_fraction=1.5"], r"actor.min_lr_fraction=1.5: must be between 0 and 1"),
        (["actor.min_lr_fraction=nan"], r"actor.min_lr_fraction=nan"),
        (["algo.loss_agg='my.module:f'"], r"algo.loss_agg='my.module:f' is unknown"),
        (["cluster.kind='my.module:f'"], r"cluster.kind='my.module:f' is unknown"),
        (["actor.lr=1e-10"], r"actor.lr=1e-10: weights are float32.*use at least 1e-09 .*lr=0"),
        (
            ["actor.lr=1e-10", "actor.precision=bf16"],
            r"actor.lr=1e-10: .*bf16 too",
        ),
        (
            ["trainer.total_steps=5", "actor.updates_per_step=2", "actor.warmup_steps=10"],
            r"actor.warmup_steps=10 with 10 optimizer steps in the run .*use at most 9",
        ),
        (
            ["trainer.run_dir=a", "trainer.resume=b"],
            r"trainer.run_dir='a' with trainer.resume='b': .*leave trainer.run_dir out",
        ),
        (["trainer.trajectories=some"], r"write all, none or sample:N"),
        (["failure.warn_mismatch=0.9"], r"failure.warn_mismatch=0.9: .* never below 1"),
        (["failure.max_start_mismatch=nan"], r"failure.max_start_mismatch=nan: .* never below 1"),
        (
            ["actor.exact=true", "actor.precision=bf16", "trainer.deterministic=false"],
            r"actor.exact=true: .* set trainer.deterministic=true, actor.precision=fp32, or",
        ),
        (["failure.max_mismatch_kl=0"], r"failure.max_mismatch_kl=0.0: must be above 0; 1e-6"),
        (["failure.policy=min_group", "failure.k=9"], r"failure.k=9 .*between 2 and rollout.n=8"),
    ],
)
def test_what_would_train_something_else_is_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load([ENV, *overrides])


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load([ENV, "rollout.n=1", "actor.lr=-1", "rollout.max_turns=0"])
    for key in ("rollout.n", "actor.lr"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.lr=0"],
        ["actor.lr=1e-9", "actor.precision=bf16"],
        ["trainer.total_steps=5", "actor.updates_per_step=2", "actor.warmup_steps=9"],
        ["trainer.run_dir=a", "trainer.resume=./a"],
        # Row counts that nothing divides are balanced, not refused.
        ["rollout.n=3", "trainer.prompts_per_step=7", "actor.updates_per_step=5"],
        ["rollout.n=5", "rollout.tree.rounds=2", "algo.advantage=tree"],
        ["actor.tokens_per_micro_batch=7"],
        ["rollout.n=2", "trainer.prompts_per_step=1", "actor.updates_per_step=2"],
        ["trainer.trajectories=sample:5"],
        ["failure.max_mismatch_kl=1e-6"],
        ["failure.max_start_mismatch=1", "failure.warn_mismatch=inf", "actor.exact=true"],
        ["failure.max_mismatch_kl=inf"],
        ["eval.temperature=0"],
        ["failure.policy=min_group", "failure.k=2"],
        ["rollout.max_staleness=2", "algo.correction.reject=[{statistic: token_k1, high: 4}]"],
        ["model.device='cuda:1'"],
        ["model.device=cpu"],
        [f"trainer.seed={2**63 - 1}"],
        ["actor.betas=[0,0.999]", "actor.min_lr_fraction=1"],
        ["rollout.engine.id='my.module:Engine'", "model.tool_parser='my.module:Parser'"],
        ["telemetry.trackers=['my.module:Tracker']"],
        ["trainer.eval_every=0", "trainer.save_every=0"],
    ],
)
def test_settings_at_the_edge_of_what_works_are_not_refused(overrides: list[str]) -> None:
    load([ENV, *overrides])


def test_serving_settings_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.serving\.max_requests=0"):
        load([ENV, "rollout.serving.max_requests=0"])
