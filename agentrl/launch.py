"""Builds the parts of a run from its configuration and hands them to the loop.

Everything here is wiring: no part knows of another one than those it is given.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agentrl.algo.config import CreditConfig
from agentrl.algo.loss import make_loss
from agentrl.config.environments import credit_configs
from agentrl.config.load import to_dict
from agentrl.config.schema import Config
from agentrl.config.validate import warmup_problems
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.dist.weight_sync.inproc import InprocWeightSync
from agentrl.errors import ConfigError
from agentrl.model.load import LoadedModel
from agentrl.playground import Playground, open_playground
from agentrl.resume import claimed_run_dir, restore
from agentrl.rollout.buffer import RolloutBuffer, Verdict
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.groups import is_trainable
from agentrl.rollout.producer import Producer
from agentrl.rollout.tasks import Dispatch
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import MissingExtraError, TrackedRun, build_trackers
from agentrl.train.assemble import assemble
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.credit import has_signal, needs_of
from agentrl.train.environments import Environment, make_environments, refuse_idle_specs
from agentrl.train.evaluate import Evaluator, choose_tasks
from agentrl.train.learner import Learner
from agentrl.train.open_model import keep_model_files
from agentrl.train.progress import Progress
from agentrl.train.reference import open_reference
from agentrl.train.requirements import refuse_unmet
from agentrl.train.rng_state import seed_rng
from agentrl.train.tasks import (
    HELD_OUT,
    Splits,
    bound_lengths,
    describe,
    load_tasks,
    open_feed,
    total_steps,
)
from agentrl.train.trainer import Trainer
from agentrl.types import TrajectoryGroup

logger = logging.getLogger(__name__)


async def train(config: Config, *, announce: Callable[[str], None] = logger.info) -> Path:
    """Run `agentrl train`; returns the run directory.

    Args:
        announce: told where the run is, before and after.

    Raises:
        ConfigError: the run that is resumed has finished.
    """
    async with open_trainer(config, announce=announce) as trainer:
        path = trainer.run_dir.path
        if trainer.step >= trainer.config.total_steps:
            setting = "total_steps" if config.trainer.epochs is None else "epochs"
            raise ConfigError(
                f"the run {str(path)!r} has finished: it stands at step {trainer.step} of "
                f"{trainer.config.total_steps}; raise trainer.{setting} to go on"
            )
        announce(f"run directory: {path}")
        await trainer.fit()
    if config.telemetry.report:
        write_report(path)
        announce(f"report: {path / 'report.html'}")
    announce(f"measure it: agentrl eval --model {path} -n 8")
    return path


@asynccontextmanager
async def open_trainer(
    config: Config, *, announce: Callable[[str], None] = logger.info
) -> AsyncIterator[Trainer]:
    """Build a trainer, restored where ``trainer.resume`` says so; leaving closes every part."""
    plan = _plan(config)
    async with AsyncExitStack() as stack:
        run_dir = stack.enter_context(claimed_run_dir(config))
        run_dir.refuse_unwritable()
        ground = await stack.enter_async_context(
            open_playground(
                config,
                plan.environments,
                examples=[found[0] for found in plan.tasks["train"].values()],
            )
        )
        _fit_to_model(plan, config, ground, announce)
        yield _trainer(config, plan, ground, run_dir, stack)


@dataclass(slots=True, kw_only=True)
class _Plan:
    """What a run works on: known, and refused where it cannot work, before a model loads."""

    environments: Sequence[Environment]
    credit: Mapping[str, CreditConfig]
    """By environment."""
    tasks: Splits
    num_steps: int = 0
    """Of the whole run; known once prompts that are too long have been left out."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Split -> tasks that were left out."""


def _plan(config: Config) -> _Plan:
    environments = make_environments(config.env, config.tools)
    refuse_idle_specs(environments, config.tools.specs)
    credit = credit_configs(config)
    refuse_unmet(environments, config, credit)
    tasks = load_tasks(environments, config.data)
    return _Plan(environments=environments, credit=credit, tasks=tasks)


def _fit_to_model(
    plan: _Plan, config: Config, ground: Playground, announce: Callable[[str], None]
) -> None:
    """Complete the plan: only the model's tokenizer can tell the length of prompts.

    Raises:
        DataError: prompts are too long.
        ConfigError: the warm-up of the learning rate does not fit into the steps there are.
    """
    plan.dropped = bound_lengths(
        plan.tasks,
        plan.environments,
        config.data,
        ground.renderer,
        max_context_tokens=config.rollout.max_context_tokens,
    )
    if config.data.sources():
        announce(describe(plan.tasks, config.data, plan.dropped))
    plan.num_steps = total_steps(config.trainer, sum(map(len, plan.tasks["train"].values())))
    if problems := list(warmup_problems(config, total_steps=plan.num_steps)):
        raise ConfigError(problems[0])


def _trainer(
    config: Config, plan: _Plan, ground: Playground, run_dir: RunDir, stack: AsyncExitStack
) -> Trainer:
    """Put the parts together; ``stack`` closes those that need it."""
    actor = _actor(config, plan, ground.model)
    checkpoints = CheckpointStore(
        run_dir.checkpoints_path,
        config=to_dict(config),
        keep_last=config.trainer.keep_last,
        keep_best=config.trainer.keep_best,
    )
    stack.callback(checkpoints.close)
    engines = {"actor": actor}
    seed_rng(config.trainer.seed)
    learner = _learner(config, plan.credit, ground.model, actor, run_dir)
    feed = open_feed(
        plan.tasks,
        plan.environments,
        config.data.curriculum,
        seed=config.trainer.seed,
        dropped=plan.dropped,
    )
    progress = restore(config, checkpoints, engines, learner, feed, run_dir)
    run_dir.write_config(yaml.safe_dump(to_dict(config), sort_keys=False))
    keep_model_files(ground.model, run_dir.path)
    buffer = RolloutBuffer(
        prompts_per_step=config.trainer.prompts_per_step,
        max_staleness=config.rollout.max_staleness,
        version=progress.step,
    )
    return Trainer(
        config=replace(config.trainer, total_steps=plan.num_steps),
        failure=config.failure,
        collect_timeout_s=config.rollout.collect_timeout_s,
        max_refills=config.algo.groups.max_refills if config.algo.groups.refill else 0,
        progress=progress,
        engines=engines,
        learner=learner,
        weights=_InprocWeights(actor, ground.engine),
        placement=_OneDevice(),
        feed=feed,
        producer=_producer(config, plan, ground, feed, buffer),
        buffer=buffer,
        assemble=partial(assemble, configs=plan.credit),
        evaluator=_evaluator(config, plan, ground),
        checkpoints=checkpoints,
        run_dir=run_dir,
        tracker=stack.enter_context(_trackers(config, run_dir, progress, plan.num_steps)),
        meter=Meter(),
    )


def _actor(config: Config, plan: _Plan, model: LoadedModel) -> FSDPEngine:
    updates_per_step = config.actor.epochs * config.actor.updates_per_step
    return FSDPEngine(
        model.model,
        model.tokenizer,
        config.actor,
        ranks=Ranks.single(model.model.device),
        temperature=config.rollout.temperature,
        total_updates=plan.num_steps * updates_per_step,
        deterministic=config.trainer.deterministic,
    )


def _learner(
    config: Config,
    credit: Mapping[str, CreditConfig],
    model: LoadedModel,
    actor: FSDPEngine,
    run_dir: RunDir,
) -> Learner:
    """Build the algorithm, with the reference policy where the KL is on."""
    reference = None
    if config.algo.kl.coef:
        reference = open_reference(
            model.model,
            run_dir.path / "reference" / "model.safetensors",
            temperature=config.rollout.temperature,
            precision=config.actor.precision,
            resumed=config.trainer.resume is not None,
        )
    return Learner(
        actor,
        algo=config.algo,
        credit=credit,
        token_loss=make_loss(config.algo.loss, config.algo.loss_kwargs),
        optimization=config.actor,
        loss_agg_tokens=config.algo.loss_agg_tokens or config.rollout.max_response_tokens,
        seed=config.trainer.seed,
        reference=reference,
    )


def _producer(
    config: Config, plan: _Plan, ground: Playground, feed: TaskFeed, buffer: RolloutBuffer
) -> Producer:
    """Build what keeps the buffer full of groups to train on."""
    run_group = ground.groups(
        config,
        purpose="train",
        num_samples=config.rollout.n,
        temperature=config.rollout.temperature,
        greedy_baseline="greedy_rewards" in needs_of(plan.credit),
        tree=config.rollout.tree,
    )
    return Producer(feed, buffer, run_group, partial(judge, config=config, credit=plan.credit))


def judge(group: TrajectoryGroup, *, config: Config, credit: Mapping[str, CreditConfig]) -> Verdict:
    """Say what a finished group is good for, under the failure policy and the choice of groups."""
    if not is_trainable(group, config.failure):
        return Verdict.FAILED
    if config.algo.groups.refill and not has_signal(group, credit):
        return Verdict.NO_SIGNAL
    return Verdict.TRAINABLE


def write_report(run: Path) -> None:
    """Write ``curves.png`` and ``report.html``; without the extra, say which one is missing."""
    from agentrl.telemetry.curves import render_curves
    from agentrl.telemetry.report import render_report

    render_report(run)
    try:
        render_curves(run)
    except MissingExtraError as error:
        logger.warning("%s", error)


def _evaluator(config: Config, plan: _Plan, ground: Playground) -> Evaluator:
    """Build what measures the policy on held-out tasks."""
    temperature = config.eval.temperature
    runners = {
        split: ground.groups(
            config,
            purpose=f"eval-{split}",
            num_samples=config.eval.n,
            temperature=config.rollout.temperature if temperature is None else temperature,
        )
        for split in HELD_OUT
    }

    async def run(split: str, dispatch: Dispatch) -> TrajectoryGroup:
        return await runners[split](dispatch)

    limits = {"val": config.eval.val_tasks, "test": config.eval.test_tasks}
    tasks = {
        split: {
            env: choose_tasks(held_out, limits[split])
            for env, held_out in plan.tasks[split].items()
        }
        for split in HELD_OUT
    }
    return Evaluator(run, tasks, every=config.trainer.eval_every, total_steps=plan.num_steps)


@asynccontextmanager
async def _no_context() -> AsyncIterator[None]:
    yield


class _OneDevice:
    """Training and sampling share the machine; neither has to give anything up."""

    def training(self):
        """Do nothing: there is no second owner of the device."""
        return _no_context()


class _InprocWeights:
    """Publishes one training engine to one rollout engine."""

    def __init__(self, actor: FSDPEngine, engine: RolloutEngine) -> None:
        self._actor = actor
        self._engine = engine
        self._sync = InprocWeightSync()

    async def publish(self, *, version: int) -> dict[str, Any]:
        """Copy and verify; see :class:`InprocWeightSync`."""
        return dict(await self._sync.publish(self._actor, self._engine, version))


def _trackers(config: Config, run_dir: RunDir, progress: Progress, num_steps: int):
    run = TrackedRun(
        directory=run_dir.path,
        name=run_dir.name,
        total_steps=num_steps,
        # A run that was killed before its first checkpoint starts over: nothing is kept.
        keep_through_step=(progress.step or -1) if config.trainer.resume else None,
        config=to_dict(config),
    )
    choices: Mapping[str, Mapping[str, Any]] = {
        "jsonl": {},
        "rich": {"quiet": config.telemetry.quiet},
        **{name: {} for name in config.telemetry.trackers},
    }
    return closing(build_trackers(choices, run, skip_missing=True))
