"""Builds the parts of a run from its configuration and hands them to the loop.

Everything here is wiring: no part knows of another one than those it is given.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agentrl.agent.renderer import Renderer
from agentrl.config.load import from_yaml, load, to_dict
from agentrl.config.schema import Config
from agentrl.dist.config import Schedule
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.weight_sync.inproc import InprocWeightSync
from agentrl.env.base import Env
from agentrl.env.registry import make_env
from agentrl.env.validate import check_tools
from agentrl.errors import ConfigError
from agentrl.kwargs import check_kwargs
from agentrl.model.load import LoadedModel
from agentrl.rollout.buffer import RolloutBuffer
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines import engine_registry
from agentrl.rollout.groups import GroupRunner, is_trainable
from agentrl.rollout.producer import Producer
from agentrl.rollout.stage import Stage, open_stage
from agentrl.rollout.tasks import Dispatch, TaskStream, check_disjoint, check_tasks, read_split
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.registry import sandbox_registry
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import MissingExtraError, TrackedRun, build_trackers
from agentrl.tool.binding import Toolbox
from agentrl.train.assemble import assemble
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.config import ModelConfig
from agentrl.train.evaluate import Evaluator, choose_tasks
from agentrl.train.open_model import is_run, keep_model_files, open_model, run_config_path
from agentrl.train.rng_state import restore_rng, seed_rng
from agentrl.train.settings import refuse_changed_settings
from agentrl.train.trainer import Progress, Trainer
from agentrl.train.update import update_policy
from agentrl.types import Task, TrajectoryGroup

logger = logging.getLogger(__name__)

HELD_OUT = ("val", "test")
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


@asynccontextmanager
async def open_sandboxes(config: SandboxConfig) -> AsyncIterator[SandboxPool]:
    """Open a pool of sandboxes; its backend starts with the first one that is asked for.

    Raises:
        RegistryError, ConfigError: no such backend, or arguments that it does not take.
    """
    backend = sandbox_registry.get(config.id)
    check_kwargs(backend, config.kwargs, key="sandbox.kwargs")
    pool = SandboxPool(
        backend(**config.kwargs),
        max_open=config.max_open,
        create_timeout_s=config.create_timeout_s,
    )
    try:
        yield pool
    finally:
        await pool.close()


@dataclass(slots=True, kw_only=True)
class Playground:
    """What evaluation, rollout and training have in common: a model that plays episodes."""

    model: LoadedModel
    engine: RolloutEngine
    stage: Stage
    concurrency: asyncio.Semaphore

    def groups(
        self, config: Config, *, purpose: str, num_samples: int, temperature: float
    ) -> GroupRunner:
        """Return what samples one prompt ``num_samples`` times."""
        return GroupRunner(
            self.stage.play,
            env_id=config.env.id,
            num_samples=num_samples,
            temperature=temperature,
            failure=config.failure,
            seed=config.trainer.seed,
            purpose=purpose,
            concurrency=self.concurrency,
            policy_version=lambda: self.engine.policy_version,
        )


@asynccontextmanager
async def open_playground(config: Config, env: Any) -> AsyncIterator[Playground]:
    """Open model, engine, environments, tools and sandboxes; leaving closes them all.

    Raises:
        AgentRLError: whatever of it cannot be used; before anything is trained.
    """
    async with AsyncExitStack() as stack:
        sandboxes = await stack.enter_async_context(open_sandboxes(config.sandbox))
        if isinstance(env, Env) and env.sandboxed:
            await sandboxes.start()
        toolbox = Toolbox(
            check_tools(env.tools, env=f"environment {config.env.id!r}"),
            replace=config.tools.specs,
            allow_import=config.tools.allow_import,
        )
        model = await open_model(
            _model_of(config),
            config.env,
            env,
            toolbox=toolbox,
            sandboxes=sandboxes,
            quiet=config.telemetry.quiet,
        )
        engine = engine_registry.get(config.rollout.engine.id)(
            copy.deepcopy(model.model),
            max_context=config.rollout.max_context_tokens,
            deterministic=config.trainer.deterministic,
            kwargs=config.rollout.engine.kwargs,
        )
        await engine.start()
        stack.push_async_callback(engine.close)
        stage = await stack.enter_async_context(
            open_stage(
                env=config.env,
                toolbox=toolbox,
                rollout=config.rollout,
                renderer=Renderer(model.tokenizer),
                engine=engine,
                sandboxes=sandboxes,
                tool_parser=config.model.tool_parser,
            )
        )
        yield Playground(
            model=model,
            engine=engine,
            stage=stage,
            concurrency=asyncio.Semaphore(config.rollout.concurrency),
        )


def _model_of(config: Config) -> ModelConfig:
    """A resumed run takes its model from its own checkpoint, whatever became of the original."""
    run = config.trainer.resume
    if run is None or not is_run(run) or not CheckpointStore.of_run(Path(run)).steps():
        return config.model
    return replace(config.model, path=run)


async def train(config: Config, *, announce: Callable[[str], None] = logger.info) -> Path:
    """Run `agentrl train`; returns the run directory.

    Args:
        announce: told where the run is, before and after.

    Raises:
        ConfigError: the run that is resumed has finished.
    """
    async with open_trainer(config) as trainer:
        path = trainer.run_dir.path
        if trainer.step >= config.trainer.total_steps:
            raise ConfigError(
                f"the run {str(path)!r} has finished: it stands at step {trainer.step} of "
                f"{config.trainer.total_steps}; raise trainer.total_steps to go on"
            )
        announce(f"run directory: {path}")
        await trainer.fit()
    if config.telemetry.report:
        write_report(path)
        announce(f"report: {path / 'report.html'}")
    announce(f"measure it: agentrl eval --model {path} -n 8")
    return path


@asynccontextmanager
async def open_trainer(config: Config) -> AsyncIterator[Trainer]:
    """Build a trainer, restored where ``trainer.resume`` says so; leaving closes every part."""
    env = make_env(config.env.id, config.env.kwargs)
    tasks = load_tasks(config, env)
    async with AsyncExitStack() as stack:
        run_dir = stack.enter_context(claimed_run_dir(config))
        ground = await stack.enter_async_context(open_playground(config, env))
        actor = FSDPEngine(
            ground.model.model,
            ground.model.tokenizer,
            config.actor,
            precision=config.actor.precision,
            temperature=config.rollout.temperature,
            total_updates=config.trainer.total_steps
            * config.actor.epochs
            * config.actor.updates_per_step,
            deterministic=config.trainer.deterministic,
        )
        checkpoints = CheckpointStore(
            run_dir.checkpoints_path,
            config=to_dict(config),
            keep_last=config.trainer.keep_last,
        )
        seed_rng(config.trainer.seed)
        progress = restore(config, checkpoints, actor, run_dir)
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
        )
        producer = Producer(
            TaskStream(tasks["train"], seed=config.trainer.seed, source=f"{config.env.id} train"),
            buffer,
            training.run,
            partial(is_trainable, failure=config.failure),
        )
        yield Trainer(
            config=config.trainer,
            failure=config.failure,
            collect_timeout_s=config.rollout.collect_timeout_s,
            progress=progress,
            actor=actor,
            weights=_InprocWeights(actor, ground.engine),
            placement=_OneDevice(),
            producer=producer,
            buffer=buffer,
            assemble=partial(assemble, config=config.algo),
            update=partial(
                update_policy, algo=config.algo, actor=config.actor, seed=config.trainer.seed
            ),
            evaluator=Evaluator(
                _eval_groups(config, ground),
                {
                    split: choose_tasks(tasks[split], _num_tasks(config, split))
                    for split in HELD_OUT
                },
                env_id=config.env.id,
                every=config.trainer.eval_every,
                total_steps=config.trainer.total_steps,
            ),
            checkpoints=checkpoints,
            run_dir=run_dir,
            tracker=stack.enter_context(_trackers(config, run_dir, progress)),
            meter=Meter(),
        )


def load_tasks(config: Config, env: Any) -> dict[str, Sequence[Task]]:
    """Read every split and check it: unique ids, evaluation disjoint from training.

    Raises:
        EnvError: a split cannot be read, or holds something else than sound tasks.
        DataError: an empty train split, repeated ids, or splits that overlap.
    """
    env_id = config.env.id
    tasks = {split: read_split(env, split, env_id=env_id) for split in ("train", *HELD_OUT)}
    check_tasks(tasks["train"], source=f"{config.env.id} train")
    for split in HELD_OUT:
        if len(tasks[split]):
            check_tasks(tasks[split], source=f"{config.env.id} {split}")
            check_disjoint(tasks["train"], tasks[split], split=split)
    return tasks


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
        run_dir = RunDir.create_named(config.env.id)
    try:
        yield run_dir
    finally:
        run_dir.close()
        run_dir.remove_if_empty()


def resumed_config(run: str, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run directory, with ``overrides`` on top.

    Raises:
        ConfigError: it is no run directory.
    """
    path = run_config_path(run)
    if not path.is_file():
        raise ConfigError(f"{run!r} is no run directory: it has no config.yaml")
    return load(overrides, base=from_yaml(path))


def restore(
    config: Config, checkpoints: CheckpointStore, actor: FSDPEngine, run_dir: RunDir
) -> Progress:
    """Load the newest sound checkpoint into ``actor`` where the run is resumed.

    A run that was killed before its first checkpoint starts again at step 0.

    Raises:
        CheckpointError: every checkpoint is damaged, or settings that change the training differ.
    """
    checkpoint = checkpoints.load_latest() if config.trainer.resume else None
    if checkpoint is None:
        run_dir.rewind(-1)
        return Progress()
    if not config.trainer.force_resume:
        # A longer run is the same run only where the learning rate does not depend on its length.
        constant = config.actor.schedule is Schedule.constant
        free = (*FREE_ON_RESUME, "trainer.total_steps") if constant else FREE_ON_RESUME
        refuse_changed_settings(checkpoint.config, to_dict(config), free=free)
    actor.load_state_dict(checkpoint.engine)
    restore_rng(checkpoint.rng)
    run_dir.rewind(checkpoint.step)
    return Progress(**checkpoint.progress)


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
        return await runners[split].run(dispatch)

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


def _trackers(config: Config, run_dir: RunDir, progress: Progress):
    run = TrackedRun(
        directory=run_dir.path,
        name=run_dir.name,
        total_steps=config.trainer.total_steps,
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
