"""A whole run directory without any training: for tests of what reads run directories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentrl.telemetry.evaluation import evaluation_metrics
from agentrl.telemetry.jsonl import JsonlTracker
from agentrl.telemetry.metrics import rollout_metrics, staleness_metrics
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import TrackedRun
from agentrl.testing.run_data import (
    make_advantages,
    make_task,
    make_trainer_logprobs,
    make_trajectory,
    synthetic_tokenizer,
)
from agentrl.types import StopReason, Trajectory, TrajectoryGroup

_FAILURES = [StopReason.ENV_TIMEOUT, StopReason.SANDBOX_ERROR, StopReason.REWARD_ERROR]
_CONFIG = """\
env:
  id: code_sandbox
  kwargs: {{level: 1}}
model:
  path: tiny
algo:
  advantage: grpo
  loss: vanilla
  loss_agg: token-mean
rollout:
  n: {group_size}
  temperature: 1.0
  max_turns: 4
actor:
  lr: 0.003
trainer:
  prompts_per_step: {prompts}
  total_steps: {total}
  seed: {seed}
failure:
  policy: retry_fresh
  k: 2
"""


def write_synthetic_run(
    path: Path,
    *,
    num_steps: int = 40,
    total_steps: int | None = None,
    seed: int = 0,
    prompts_per_step: int = 6,
    group_size: int = 4,
    num_eval_tasks: int = 60,
    tool_output: str | None = None,
) -> RunDir:
    """Write config, tokenizer, metrics, trajectories and evaluations of a run that learned.

    Args:
        path: a new directory.
        num_steps: steps that were done.
        total_steps: steps that were asked for; more than ``num_steps`` looks like a crash.
        seed: decides everything.
        prompts_per_step: groups per step.
        group_size: samples per group.
        num_eval_tasks: tasks of each evaluation.
        tool_output: text of every tool answer.
    """
    total = total_steps or num_steps
    with RunDir.create(path) as run:
        run.write_config(
            _CONFIG.format(group_size=group_size, prompts=prompts_per_step, total=total, seed=seed)
        )
        run.model_path.mkdir()
        synthetic_tokenizer().save(str(run.model_path / "tokenizer.json"))
        tracker = JsonlTracker(TrackedRun(directory=run.path))
        evaluate_every = max(total // 4, 1)
        for step in range(num_steps + 1):
            rng = np.random.default_rng([seed, step])
            metrics: dict[str, float] = {}
            if step:
                groups = [
                    _group(rng, step, prompt, group_size, total, tool_output)
                    for prompt in range(prompts_per_step)
                ]
                metrics |= _train_step(run, rng, step, groups, total)
            if step % evaluate_every == 0:
                metrics |= _evaluation(run, rng, step, num_eval_tasks, total)
            tracker.log(metrics, step)
        tracker.close()
    return run


def _skill(step: int, total: int) -> float:
    """Probability of success: a curve that saturates."""
    return 0.3 + 0.64 * (1 - math.exp(-3.5 * step / total))


def _group(
    rng: np.random.Generator,
    step: int,
    prompt: int,
    group_size: int,
    total: int,
    tool_output: str | None,
) -> TrajectoryGroup:
    task = make_task(int(rng.integers(0, 10_000)))
    group = TrajectoryGroup(
        id=f"train-{step}-{prompt}",
        task=task,
        env_id="code_sandbox",
        trajectories=[],
        policy_version=step - 1,
    )

    def sample(index: int, attempt: int) -> Trajectory:
        reason = StopReason.TERMINATED
        if rng.random() < 0.04:
            reason = _FAILURES[int(rng.integers(len(_FAILURES)))]
        elif rng.random() < 0.25 * (1 - step / total):
            reason = StopReason.MAX_TURNS
        solved = reason is StopReason.TERMINATED and bool(rng.random() < _skill(step, total))
        return make_trajectory(
            seed=int(rng.integers(2**31)),
            identity=f"{group.id}/{index}/{attempt}",
            task=task,
            group_id=group.id,
            sample_index=index,
            attempt=attempt,
            policy_version=step - 1,
            success=solved,
            stop_reason=reason,
            num_turns=min(4, 1 + int(rng.poisson(1.6 + 0.8 * step / total))),
            tool_output=tool_output,
        )

    for index in range(group_size):
        member = sample(index, 0)
        if member.failed:
            group.discarded.append(member)
            member = sample(index, 1)
        group.trajectories.append(member)
    return group


def _train_step(
    run: RunDir,
    rng: np.random.Generator,
    step: int,
    groups: Sequence[TrajectoryGroup],
    total: int,
) -> dict[str, float]:
    members = [member for group in groups for member in group.trajectories]
    advantages = make_advantages(members)
    everything = members + [attempt for group in groups for attempt in group.discarded]
    run.write_trajectories(
        step,
        everything,
        advantages=advantages,
        trainer_logprobs=make_trainer_logprobs(members, seed=step),
    )
    flat = {g.id for g in groups if len({m.total_reward for m in g.trajectories}) == 1}
    trained = {member.id for member in members if member.group_id not in flat}
    left = 1 - step / total
    collect, update, sync = 2.0 + rng.random(), 1.1 + 0.2 * rng.random(), 0.05
    tokens = sum(member.num_sampled_tokens for member in members)
    return {
        "policy_version": step - 1,
        **rollout_metrics(groups, trained_ids=trained, tools=["python"]),
        **staleness_metrics(members, step - 1),
        "actor/loss": 0.02 * rng.normal(),
        "actor/pg_clipfrac": 0.01 + 0.02 * rng.random(),
        "actor/kl": 0.002 * step / total + 0.0004 * rng.random(),
        "actor/entropy": 0.2 + 0.6 * left + 0.02 * rng.random(),
        "actor/entropy/turn_1": 0.1 + 0.6 * left + 0.02 * rng.random(),
        "actor/entropy/turn_2": 0.3 + 0.6 * left + 0.02 * rng.random(),
        "credit/reward/outcome": 0.7 - 0.5 * left,
        "credit/reward/turn": 0.1 * rng.random(),
        "credit/advantage_mass/turn_1": 0.4 + 0.3 * left,
        "credit/advantage_mass/turn_2": 0.6 - 0.3 * left,
        "actor/grad_norm": 0.3 + 0.5 * rng.random() + 0.4 * left,
        "actor/lr": 0.003 * min(1.0, step / 5),
        "mismatch/logprob_abs_mean": 2e-6 + 1e-6 * rng.random(),
        "mismatch/by_turn/turn_1": 1e-6 + 1e-6 * rng.random(),
        "mismatch/by_turn/turn_2": 3e-6 + 1e-6 * rng.random(),
        "timing_s/collect": collect,
        "timing_s/update": update,
        "timing_s/update/logprob": 0.3 * update,
        "timing_s/sync": sync,
        "timing_s/step": collect + update + sync + 0.06 * rng.random(),
        "throughput/rollout_tokens_per_s": tokens / collect,
        "throughput/train_tokens_per_s": 3 * tokens / update,
    }


def _evaluation(
    run: RunDir, rng: np.random.Generator, step: int, num_tasks: int, total: int
) -> dict[str, float]:
    groups = []
    for index in range(num_tasks):
        task = make_task(100_000 + index)
        harder = 0.12 * (int(task.tags["level"]) - 1)
        skill = max(_skill(step, total) - harder, 0.02)
        # One draw per task, whatever the step: tasks keep their difficulty.
        threshold = np.random.default_rng([7, index]).random()
        members = [
            make_trajectory(
                seed=int(rng.integers(2**31)),
                identity=f"val-{index}/{sample}",
                task=task,
                group_id=f"eval-val-{index}",
                sample_index=sample,
                policy_version=step,
                success=bool(0.5 * threshold + 0.5 * rng.random() < skill),
            )
            for sample in range(2)
        ]
        if index % 29 == 7:
            failed = make_trajectory(seed=index, task=task, stop_reason=StopReason.ENV_TIMEOUT)
            members[1] = replace(
                failed, id=members[1].id, group_id=members[1].group_id, sample_index=1
            )
        groups.append(
            TrajectoryGroup(
                id=f"eval-val-{index}",
                task=task,
                env_id="code_sandbox",
                trajectories=members,
                policy_version=step,
            )
        )
    run.write_evaluation(step, [member for group in groups for member in group.trajectories])
    return evaluation_metrics(groups, prefix="val/code_sandbox")
