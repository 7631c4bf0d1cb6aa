"""Refuses what cannot run, or would run and train something else than meant.

Every message says what is wrong, what was got, and what to write instead. Nothing is changed
here, and no model is loaded.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.algorithm import algorithm_problems
from agentrl.config.asynchrony import asynchrony_problems
from agentrl.config.cluster import LOCAL, RAY, cluster_problems
from agentrl.config.data import data_problems
from agentrl.config.engines import engine_problems
from agentrl.config.environments import mixed_credit_problems
from agentrl.config.rollout_engines import rollout_engine_problems
from agentrl.dist.weight_sync.config import TRANSPORTS
from agentrl.env.entries import mix_problems
from agentrl.errors import ConfigError
from agentrl.reward.checks import reward_problems
from agentrl.rollout.config import FailurePolicy, TreeConfig
from agentrl.rollout.serving.config import serving_problems
from agentrl.train.config import TINY

if TYPE_CHECKING:
    from agentrl.config.schema import Config

_MAX_SEED = 2**63 - 1
_MIN_VOCAB_SIZE = 259  # all bytes and the special tokens of the embedded model
_MIN_TEMPERATURE = 0.01  # below it sampling is greedy but for ties
_IMPORTABLE = ("rollout.engine.id", "model.tool_parser", "telemetry.trackers")
_IMPORTABLE += ("weight_sync.transport",)
"""Choices that may also be an import path, ``package.module:Name``."""


def validate(config: Config) -> None:
    """Check settings against each other.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    problems = [
        *_ranges(config),
        *_bounds(config),
        *_forms(config),
        *_signal(config),
        *engine_problems(config),
        *algorithm_problems(config),
        *asynchrony_problems(config),
        *mixed_credit_problems(config),
        *data_problems(config),
        *_budgets(config),
        *reward_problems(config.reward, max_response_tokens=config.rollout.max_response_tokens),
        *_failure(config),
        *serving_problems(config.rollout.serving),
        *rollout_engine_problems(config),
        *cluster_problems(config),
        *_choices(config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _ranges(config: Config) -> Iterable[str]:
    at_least_one = {
        "rollout.n": config.rollout.n,
        "rollout.max_turns": config.rollout.max_turns,
        "rollout.max_turn_tokens": config.rollout.max_turn_tokens,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.max_context_tokens": config.rollout.max_context_tokens,
        "rollout.max_turn_calls": config.rollout.max_turn_calls,
        "rollout.concurrency": config.rollout.concurrency,
        "trainer.prompts_per_step": config.trainer.prompts_per_step,
        "trainer.keep_last": config.trainer.keep_last,
        "eval.n": config.eval.n,
        "env.threads": config.env.threads,
        "env.processes": config.env.processes,
        "model.warm_start.steps": config.model.warm_start.steps,
        "model.warm_start.episodes_per_step": config.model.warm_start.episodes_per_step,
        "sandbox.max_open": config.sandbox.max_open,
        "tools.breaker.max_failures": config.tools.breaker.max_failures,
        "failure.max_empty_steps": config.failure.max_empty_steps,
        "failure.max_skipped_updates": config.failure.max_skipped_updates,
    }
    for key, value in at_least_one.items():
        if value < 1:
            yield f"{key}={value}: must be at least 1"
    at_least_zero = {
        "rollout.top_k": config.rollout.top_k,
        "rollout.max_staleness": config.rollout.max_staleness,
        "trainer.eval_every": config.trainer.eval_every,
        "trainer.save_every": config.trainer.save_every,
        "trainer.num_threads": config.trainer.num_threads,
        "eval.val_tasks": config.eval.val_tasks,
        "eval.test_tasks": config.eval.test_tasks,
        "env.max_leaked_threads": config.env.max_leaked_threads,
        "model.warm_start.lr": config.model.warm_start.lr,
        "failure.k": config.failure.k,
        "eval.temperature": config.eval.temperature or 0.0,
    }
    for key, value in at_least_zero.items():
        if not (value >= 0 and math.isfinite(value)):
            yield f"{key}={value}: must be a finite number of at least 0"
    deadlines = {
        "rollout.trajectory_timeout_s": config.rollout.trajectory_timeout_s,
        "rollout.close_timeout_s": config.rollout.close_timeout_s,
        "rollout.reward_timeout_s": config.rollout.reward_timeout_s,
        "rollout.collect_timeout_s": config.rollout.collect_timeout_s,
        "env.tasks_timeout_s": config.env.tasks_timeout_s,
        "env.reset_timeout_s": config.env.reset_timeout_s,
        "env.step_timeout_s": config.env.step_timeout_s,
        "env.close_timeout_s": config.env.close_timeout_s,
        "sandbox.create_timeout_s": config.sandbox.create_timeout_s,
        "tools.breaker.cooldown_s": config.tools.breaker.cooldown_s,
        "tools.breaker.give_up_s": config.tools.breaker.give_up_s,
        "trainer.grace_s": config.trainer.grace_s,
    }
    for key, value in deadlines.items():
        if not (value > 0 and math.isfinite(value)):
            yield f"{key}={value}: a deadline must be a finite number above 0"


def _bounds(config: Config) -> Iterable[str]:
    """Ranges with two ends. The wide upper ones only catch a slip of the hand."""
    warm_start = config.model.warm_start
    between = {
        "rollout.n": (config.rollout.n, None, 4096),
        "rollout.max_context_tokens": (config.rollout.max_context_tokens, None, 10_000_000),
        "trainer.prompts_per_step": (config.trainer.prompts_per_step, None, 1_000_000),
        "trainer.num_threads": (config.trainer.num_threads, None, 1024),
        "trainer.seed": (config.trainer.seed, 0, _MAX_SEED),
        "model.warm_start.episodes_per_step": (warm_start.episodes_per_step, None, 65536),
        "model.warm_start.seed": (warm_start.seed, 0, _MAX_SEED),
        "model.warm_start.vocab_size": (warm_start.vocab_size, _MIN_VOCAB_SIZE, 65536),
    }
    for key, (value, low, high) in between.items():
        if low is None and value > high:  # its lower end is checked above
            yield f"{key}={value}: must be at most {high}"
        elif low is not None and not low <= value <= high:
            yield f"{key}={value}: must be between {low} and {high}"


def _forms(config: Config) -> Iterable[str]:
    """Texts that have to be written in one of a few ways."""
    if not re.fullmatch(r"all|none|sample:[1-9]\d*", config.trainer.trajectories):
        yield f"trainer.trajectories={config.trainer.trajectories!r}: write all, none or sample:N"
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", config.model.device):
        yield f"model.device={config.model.device!r}: write auto, cpu, cuda or cuda:N"
    for name in ("run_dir", "resume"):
        text = getattr(config.trainer, name)
        if text is not None and not text.strip():
            yield (
                f"trainer.{name}={text!r} is empty: give a directory, or leave the setting out "
                f"(trainer.{name}=null)"
            )
    run_dir, resume = config.trainer.run_dir, config.trainer.resume
    if run_dir and resume and Path(run_dir).resolve() != Path(resume).resolve():
        yield (
            f"trainer.run_dir={run_dir!r} with trainer.resume={resume!r}: a resumed run goes on in "
            "its own directory; leave trainer.run_dir out, or copy the run there and resume the "
            "copy"
        )


def _signal(config: Config) -> Iterable[str]:
    """Settings with which the gradient would be zero, or not that of the sampled policy."""
    rollout = config.rollout
    if not (rollout.temperature >= _MIN_TEMPERATURE and math.isfinite(rollout.temperature)):
        yield (
            f"rollout.temperature={rollout.temperature}: samples of a group would all be alike and "
            f"nothing could be learned; use 1.0, at least {_MIN_TEMPERATURE} (for greedy "
            "evaluation set eval.temperature=0)"
        )
    if rollout.top_p != 1.0 or rollout.top_k != 0:
        yield (
            f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: the trainer computes "
            "probabilities over the whole vocabulary, so every importance ratio would be wrong; "
            "train with top_p=1 and top_k=0"
        )
    if problem := rollout.tree.problem(rollout.n):
        yield problem
    elif not rollout.tree.rounds and rollout.tree.trunks != TreeConfig().trunks:
        yield (
            f"rollout.tree.trunks={rollout.tree.trunks} with rollout.tree.rounds=0: every episode "
            "is played from the start, so there are no trees; set rollout.tree.rounds to at least "
            "1, or leave trunks out"
        )


def _budgets(config: Config) -> Iterable[str]:
    rollout = config.rollout
    if rollout.max_turn_tokens > rollout.max_response_tokens:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens} is above "
            f"rollout.max_response_tokens={rollout.max_response_tokens}, which ends the whole "
            "trajectory: lower the first or raise the second"
        )
    if rollout.max_response_tokens >= rollout.max_context_tokens:
        yield (
            f"rollout.max_response_tokens={rollout.max_response_tokens} leaves no room for a "
            f"prompt within rollout.max_context_tokens={rollout.max_context_tokens}: raise the "
            "second"
        )


def _failure(config: Config) -> Iterable[str]:
    failure = config.failure
    for name in ("max_start_mismatch", "warn_mismatch"):
        if not (value := getattr(failure, name)) >= 1:
            yield (
                f"failure.{name}={value}: a mean of exp(|difference|) is never below 1; 1.05 is "
                "near for bfloat16, 1.0001 for float32"
            )
    if not failure.max_mismatch_kl > 0:
        yield (
            f"failure.max_mismatch_kl={failure.max_mismatch_kl}: must be above 0; 1e-6 is strict "
            "for float32"
        )
    if failure.policy is FailurePolicy.min_group and not 2 <= failure.k <= config.rollout.n:
        yield (
            f"failure.k={failure.k} with failure.policy=min_group: must be between 2 and "
            f"rollout.n={config.rollout.n}"
        )


def _choices(config: Config) -> Iterable[str]:
    from agentrl.algo.aggregate import AGGREGATIONS
    from agentrl.rollout.engines import engine_registry
    from agentrl.telemetry.tracker import TRACKERS
    from agentrl.tool.parsers import parser_registry

    if not config.model.path:
        yield "model.path is not set: give a hub id, a directory, a .gguf file, or tiny"
    if config.model.path == TINY and config.model.chat_template is not None:
        yield (
            f"model.chat_template={config.model.chat_template!r} with model.path={TINY}: the "
            "embedded model is made with a template of its own, so it would change nothing; leave "
            "it out, or name another model"
        )
    yield from mix_problems(config.env)
    choices: dict[str, tuple[str, Iterable[str]]] = {
        "algo.loss_agg": (config.algo.loss_agg, AGGREGATIONS),
        "rollout.engine.id": (config.rollout.engine.id, engine_registry.names()),
        "cluster.kind": (config.cluster.kind, [LOCAL, RAY]),
        "weight_sync.transport": (config.weight_sync.transport, TRANSPORTS),
    }
    if config.model.tool_parser is not None:
        choices["model.tool_parser"] = (config.model.tool_parser, parser_registry.names())
    for index, tracker in enumerate(config.telemetry.trackers):
        choices[f"telemetry.trackers[{index}]"] = (tracker, TRACKERS.names())
    for key, (value, known) in choices.items():
        names = list(known)
        is_path = ":" in value and key.startswith(_IMPORTABLE)
        if value not in names and not is_path:
            close = difflib.get_close_matches(value, names, n=2)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            yield f"{key}={value!r} is unknown; {hint}known: {', '.join(names)}"
