"""Builds the parts of a run from its configuration and hands them to the loop.

Everything here is wiring: no part knows of another one than those it is given.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agentrl.algo.config import CreditConfig
from agentrl.algo.loss import make_loss
from agentrl.config.environments import credit_configs
from agentrl.config.load import from_yaml, load, to_dict
from agentrl.config.schema import Config
from agentrl.config.validate import warmup_problems
from agentrl.dist.config import Schedule
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.weight_sync.inproc import InprocWeightSync
from agentrl.env.entries import run_label
from agentrl.errors import ConfigError
from agentrl.model.load import LoadedModel
from agentrl.playground import Playground, open_playground
from agentrl.rollout.buffer import RolloutBuffer, Verdict
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.groups import is_trainable
from agentrl.rollout.producer import Producer
from agentrl.rollout.tasks import Dispatch
from agentrl.telemetry.jsonl import missing_steps
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import MissingExtraError, TrackedRun, build_trackers
from agentrl.train.assemble import assemble
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.credit import has_signal, needs_of
from agentrl.train.environments import make_environments, refuse_idle_specs
from agentrl.train.evaluate import Evaluator, choose_tasks
from agentrl.train.learner import Learner
from agentrl.train.open_model import keep_model_files, run_config_path
from agentrl.train.reference import open_reference
from agentrl.train.requirements import refuse_unmet
from agentrl.train.rng_state import restore_rng, seed_rng
from agentrl.train.settings import refuse_changed_settings
from agentrl.train.tasks import (
    HELD_OUT,
    bound_lengths,
    describe,
    load_tasks,
    open_feed,
    total_steps,
)
from agentrl.train.trainer import Progress, Trainer
from agentrl.types import TrajectoryGroup

logger = logging.getLogger(__name__)

# Settings that a resumed run may change: they decide where and how long, not what is trained.
FREE_ON_RESUME = (
    "trainer.save_every",
    "trainer.keep_last",
    "trainer.run_dir",
    "trainer.resume",
    "trainer.force_resume",
    "trainer.trajectories",
    "telemetry.",
    "sandbox.max_open",
    "sandbox.create_timeout_s",
    "rollout.collect_timeout_s",
)


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
    environments = make_environments(config.env, config.tools)
    refuse_idle_specs(environments, config.tools.specs)
    credit = credit_configs(config)
    refuse_unmet(environments, config, credit)
    tasks = load_tasks(environments, config.data)
    async with AsyncExitStack() as stack:
        run_dir = stack.enter_context(claimed_run_dir(config))
        run_dir.refuse_unwritable()
        examples = [found[0] for found in tasks["train"].values()]
        ground = await stack.enter_async_context(
            open_playground(config, environments, examples=examples)
        )
        # Only the model's tokenizer can tell the length of prompts, and only they that of the run.
        dropped = bound_lengths(tasks, environments, config.data, ground.renderer)
        if config.data.sources():
            announce(describe(tasks, config.data, dropped))
        num_steps = total_steps(config.trainer, sum(map(len, tasks["train"].values())))
        if problems := list(warmup_problems(config, total_steps=num_steps)):
            raise ConfigError(problems[0])
        actor = FSDPEngine(
            ground.model.model,
            ground.model.tokenizer,
            config.actor,
            precision=config.actor.precision,
            temperature=config.rollout.temperature,
            total_updates=num_steps * config.actor.epochs * config.actor.updates_per_step,
            deterministic=config.trainer.deterministic,
        )
        checkpoints = CheckpointStore(
            run_dir.checkpoints_path,
            config=to_dict(config),
            keep_last=config.trainer.keep_last,
        )
        seed_rng(config.trainer.seed)
        learner = _learner(config, credit, ground.model, actor, run_dir)
        feed = open_feed(
            tasks,
            environments,
            config.data.curriculum,
            seed=config.trainer.seed,
            dropped=dropped,
        )
        progress = restore(config, checkpoints, actor, feed, run_dir)
        if progress.learner:
            learner.load_state_dict(progress.learner)
        run_dir.write_config(yaml.safe_dump(to_dict(config), sort_keys=False))
        keep_model_files(ground.model, run_dir.path)
        buffer = RolloutBuffer(
            prompts_per_step=config.trainer.prompts_per_step,
            max_staleness=config.rollout.max_staleness,
            version=progress.step,
        )
        training = ground.groups(
            config,
            purpose="train",
            num_samples=config.rollout.n,
            temperature=config.rollout.temperature,
            greedy_baseline="greedy_rewards" in needs_of(credit),
            tree=config.rollout.tree,
        )
        producer = Producer(
            feed,
            buffer,
            training,
            partial(judge, config=config, credit=credit),
        )
        yield Trainer(
            config=replace(config.trainer, total_steps=num_steps),
            failure=config.failure,
            collect_timeout_s=config.rollout.collect_timeout_s,
            max_refills=config.algo.groups.max_refills if config.algo.groups.refill else 0,
            progress=progress,
            actor=actor,
            learner=learner,
            weights=_InprocWeights(actor, ground.engine),
            placement=_OneDevice(),
            feed=feed,
            producer=producer,
            buffer=buffer,
            assemble=partial(assemble, configs=credit),
            evaluator=Evaluator(
                _eval_groups(config, ground),
                {
                    split: {
                        env: choose_tasks(held_out, _num_tasks(config, split))
                        for env, held_out in tasks[split].items()
                    }
                    for split in HELD_OUT
                },
                every=config.trainer.eval_every,
                total_steps=num_steps,
            ),
            checkpoints=checkpoints,
            run_dir=run_dir,
            tracker=stack.enter_context(_trackers(config, run_dir, progress, num_steps)),
            meter=Meter(),
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


def judge(group: TrajectoryGroup, *, config: Config, credit: Mapping[str, CreditConfig]) -> Verdict:
    """Say what a finished group is good for, under the failure policy and the choice of groups."""
    if not is_trainable(group, config.failure):
        return Verdict.FAILED
    if config.algo.groups.refill and not has_signal(group, credit):
        return Verdict.NO_SIGNAL
    return Verdict.TRAINABLE


@contextmanager
def claimed_run_dir(config: Config) -> Iterator[RunDir]:
    """Create the run directory, or open the one that is resumed; hold its lock meanwhile.

    A start that is refused later on leaves no empty directory behind.
    """
    if config.trainer.resume:
        run_dir = RunDir.resume(config.trainer.resume)
    elif config.trainer.run_dir:
        run_dir = RunDir.create(config.trainer.run_dir)
    else:
        run_dir = RunDir.create_named(run_label(config.env))
    try:
        yield run_dir
    finally:
        run_dir.close()
        run_dir.remove_if_empty()


def resumed_config(run: str, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run directory, with ``overrides`` on top, to resume it.

    Raises:
        ConfigError: it is no run directory, or another one is to be written or resumed.
    """
    path = run_config_path(run)
    if not path.is_file():
        raise ConfigError(f"{run!r} is no run directory: it has no config.yaml")
    base = from_yaml(path)
    base.trainer.resume = run
    base.trainer.run_dir = None  # where the run began; it may have been moved since
    config = load(overrides, base=base)
    if config.trainer.resume != run:
        raise ConfigError(
            f"trainer.resume={config.trainer.resume!r} with --resume {run}: which run is meant? "
            "Leave one of them out"
        )
    return config


def restore(
    config: Config,
    checkpoints: CheckpointStore,
    actor: FSDPEngine,
    feed: TaskFeed,
    run_dir: RunDir,
) -> Progress:
    """Load the newest sound checkpoint into ``actor`` and ``feed`` where the run is resumed.

    A run that was killed before its first checkpoint starts again at step 0.

    Raises:
        CheckpointError: every checkpoint is damaged, or settings that change the training, or the
            training tasks, differ.
    """
    checkpoint = checkpoints.load_latest() if config.trainer.resume else None
    if checkpoint is None:
        run_dir.rewind(-1)
        return Progress()
    if not config.trainer.force_resume:
        # A longer run is the same run only where the learning rate does not depend on its length.
        constant = config.actor.schedule is Schedule.constant
        length = ("trainer.total_steps", "trainer.epochs") if constant else ()
        free = (*FREE_ON_RESUME, *length)
        refuse_changed_settings(checkpoint.config, to_dict(config), free=free)
    progress = Progress(**checkpoint.progress)
    if missing := missing_steps(run_dir.metrics_path, through=checkpoint.step):
        logger.warning(
            "%s has no lines of %d of the steps 0 to %d (%s): deleted or emptied? The run goes on, "
            "but its curves and report will lack them",
            run_dir.metrics_path,
            len(missing),
            checkpoint.step,
            ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else ""),
        )
    feed.load_state_dict(progress.feed, check_tasks=not config.trainer.force_resume)
    actor.load_state_dict(checkpoint.engine)
    restore_rng(checkpoint.rng)
    run_dir.rewind(checkpoint.step)
    return progress


def write_report(run: Path) -> None:
    """Write ``curves.png`` and ``report.html``; without the extra, say which one is missing."""
    from agentrl.telemetry.curves import render_curves
    from agentrl.telemetry.report import render_report

    render_report(run)
    try:
        render_curves(run)
    except MissingExtraError as error:
        logger.warning("%s", error)


def _eval_groups(config: Config, ground: Playground):
    temperature = (
        config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    )
    runners = {
        split: ground.groups(
            config, purpose=f"eval-{split}", num_samples=config.eval.n, temperature=temperature
        )
        for split in HELD_OUT
    }

    async def run(split: str, dispatch: Dispatch) -> TrajectoryGroup:
        return await runners[split](dispatch)

    return run


def _num_tasks(config: Config, split: str) -> int:
    return config.eval.val_tasks if split == "val" else config.eval.test_tasks


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
