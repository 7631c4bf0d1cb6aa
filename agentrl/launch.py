"""Builds the parts of a run from its configuration and hands them to the loop.

Everything here is wiring: no part knows of another one than those it is given.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agentrl.algo.config import CreditConfig
from agentrl.algo.loss import make_loss
from agentrl.cluster import open_cluster
from agentrl.config.cluster import LOCAL, gpu_shortage
from agentrl.config.code_files import named_files, stamped
from agentrl.config.load import to_dict
from agentrl.config.schema import Config
from agentrl.dist.build import EngineSpec
from agentrl.dist.config import COMPILES
from agentrl.dist.group_engine import GroupEngine
from agentrl.engines import engine_specs, open_engines
from agentrl.errors import ConfigError
from agentrl.memory_plan import check_memory, keep_plan, sleep_level
from agentrl.plan import TRAIN, Plan, fit_to_model, make_plan
from agentrl.resume import claimed_run_dir, restore
from agentrl.resuming import FILES, refuse_finished
from agentrl.rollout.buffer import Lookahead, RolloutBuffer, Verdict
from agentrl.rollout.config import Stragglers
from agentrl.rollout.engines import EVALUATION_ONLY
from agentrl.rollout.groups import is_trainable
from agentrl.rollout.producer import Producer
from agentrl.rollout.tasks import Dispatch
from agentrl.rollouts import Rollouts, open_local
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import MissingExtraError, TrackedRun, build_trackers
from agentrl.train.assemble import assemble
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.compute_thread import ComputeThread
from agentrl.train.config import TelemetryConfig
from agentrl.train.credit import has_signal
from agentrl.train.critic import Critic
from agentrl.train.environments import code_files
from agentrl.train.evaluate import Evaluator, choose_tasks
from agentrl.train.learner import Learner
from agentrl.train.open_model import keep_model_files
from agentrl.train.preemption import going_on, resume_command, stop_on_sigterm
from agentrl.train.progress import Progress
from agentrl.train.rng_state import seed_rng
from agentrl.train.tasks import (
    HELD_OUT,
    open_feed,
)
from agentrl.train.trainer import Trainer
from agentrl.types import TrajectoryGroup

logger = logging.getLogger(__name__)


async def train(
    config: Config,
    *,
    announce: Callable[[str], None] = logger.info,
    begun: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Run `agentrl train`; returns the run directory.

    Args:
        announce: told where the run is, before and after.
        begun: given the run directory once there is something to go on with.

    Raises:
        ConfigError: the run that is resumed has finished.
    """
    async with open_trainer(config, announce=announce) as trainer:
        path = trainer.run_dir.path
        refuse_finished(
            config, str(path), step=trainer.step, total_steps=trainer.config.total_steps
        )
        announce(f"run directory: {path}")
        if config.actor.compile or config.critic.compile:
            announce(COMPILES)
        begun(path)
        how_to_go_on = partial(going_on, path, resume_command(path))
        with stop_on_sigterm(
            trainer.request_stop, grace_s=config.trainer.grace_s, how_to_go_on=how_to_go_on
        ):
            gc.collect()
            gc.freeze()  # what is open by now stays: no later collection goes over it again
            try:
                await trainer.fit()
            finally:
                gc.unfreeze()
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
    _refuse_engines_without_weights(config)
    async with AsyncExitStack() as stack:
        # First what files alone can tell: nobody reads a plan of a run that cannot be written.
        run_dir = stack.enter_context(claimed_run_dir(config))
        run_dir.refuse_unwritable()
        _refuse_missing_gpus(config)
        plan = make_plan(config)
        memory = check_memory(config, quiet=config.telemetry.quiet)
        open_rollouts = open_local if config.cluster.kind == LOCAL else open_cluster
        settled = replace(config.rollout, sleep_level=sleep_level(config, memory))
        rollouts = await stack.enter_async_context(
            open_rollouts(
                replace(config, rollout=settled),
                plan,
                partial(fit_to_model, plan, config, announce),
            )
        )
        keep_plan(memory, run_dir.path)
        specs = engine_specs(config, plan, rollouts.model, run_dir)
        engines = await open_engines(config, specs, stack)
        await rollouts.opened()
        yield _trainer(config, plan, rollouts, specs, engines, run_dir, stack)


def _refuse_engines_without_weights(config: Config) -> None:
    if (kind := config.rollout.engine.id) in EVALUATION_ONLY:
        raise ConfigError(
            f"rollout={kind}: its server takes no weights, so it can only evaluate; train with "
            "rollout=vllm, sglang or hf"
        )


def _refuse_missing_gpus(config: Config) -> None:
    if config.cluster.kind == LOCAL:
        return
    import torch

    if problem := gpu_shortage(config, here=torch.cuda.device_count()):
        raise ConfigError(problem)


def _trainer(
    config: Config,
    plan: Plan,
    rollouts: Rollouts,
    specs: Mapping[str, EngineSpec],
    engines: Mapping[str, GroupEngine],
    run_dir: RunDir,
    stack: AsyncExitStack,
) -> Trainer:
    """Put the parts together; ``stack`` closes those that need it."""
    trained = {role: engine for role, engine in engines.items() if specs[role].trainable}
    actor = engines["actor"]
    code = code_files(plan.environments, config.tools.specs)
    files = stamped(code | named_files(config))
    checkpoints = CheckpointStore(
        run_dir.checkpoints_path,
        config={**to_dict(config), FILES: files},
        keep_last=config.trainer.keep_last,
        keep_best=config.trainer.keep_best,
    )
    stack.callback(checkpoints.close)
    seed_rng(config.trainer.seed)
    learner = _learner(config, plan.credit, engines)
    feed = open_feed(
        plan.tasks,
        plan.environments,
        config.data.curriculum,
        seed=config.trainer.seed,
        dropped=plan.dropped,
    )
    rules = _lookahead(config, plan.num_steps)
    progress, line = restore(config, checkpoints, trained, learner, feed, run_dir, rules, files)
    run_dir.write_config(yaml.safe_dump(to_dict(config), sort_keys=False))
    frozen = actor if config.lora.rank else None
    keep_model_files(rollouts.model, run_dir.path, frozen=frozen, trained=progress.step > 0)
    buffer = RolloutBuffer(rules, version=progress.step, line=line)
    compute = ComputeThread()
    stack.callback(compute.close)
    return Trainer(
        config=replace(config.trainer, total_steps=plan.num_steps),
        failure=config.failure,
        collect_timeout_s=config.rollout.collect_timeout_s,
        max_refills=config.algo.groups.max_refills if config.algo.groups.refill else 0,
        progress=progress,
        engines=trained,
        learner=learner,
        weights=rollouts.weights(actor),
        placement=rollouts.placement(actor),
        feed=feed,
        producer=Producer(
            feed,
            buffer,
            rollouts.runner(TRAIN),
            partial(judge, config=config, credit=plan.credit),
            rollouts.cutter(TRAIN),
        ),
        buffer=buffer,
        assemble=partial(assemble, configs=plan.credit),
        evaluator=_evaluator(config, plan, rollouts),
        checkpoints=checkpoints,
        run_dir=run_dir,
        tracker=stack.enter_context(_trackers(config, run_dir, progress, plan.num_steps)),
        meter=Meter(),
        compute=compute,
    )


def _lookahead(config: Config, num_steps: int) -> Lookahead:
    """Return how far sampling may run ahead of training."""
    return Lookahead(
        prompts_per_step=config.trainer.prompts_per_step,
        max_staleness=config.rollout.max_staleness,
        num_ahead=config.rollout.oversubscribe,
        window=config.rollout.window,
        cuts=config.rollout.stragglers is Stragglers.cut,
        total_steps=num_steps,
    )


def _learner(
    config: Config, credit: Mapping[str, CreditConfig], engines: Mapping[str, GroupEngine]
) -> Learner:
    """Build the algorithm, with the reference policy where the KL is on, and a critic if any."""
    actor = engines["actor"]
    reference = None
    if config.algo.kl.coef:
        reference = actor.without_adapters() if config.lora.rank else engines["reference"]
        reference.offload()
    critic = None
    if "critic" in engines:
        critic = Critic(engine=engines["critic"], config=config.critic, seed=config.trainer.seed)
    return Learner(
        actor,
        algo=config.algo,
        credit=credit,
        token_loss=make_loss(config.algo.loss, config.algo.loss_kwargs),
        optimization=config.actor,
        loss_agg_tokens=config.algo.loss_agg_tokens or config.rollout.max_response_tokens,
        seed=config.trainer.seed,
        reference=reference,
        critic=critic,
    )


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


def _evaluator(config: Config, plan: Plan, rollouts: Rollouts) -> Evaluator:
    """Build what measures the policy on held-out tasks."""
    runners = {split: rollouts.runner(split) for split in HELD_OUT}

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
    return Evaluator(
        run,
        tasks,
        every=config.trainer.eval_every,
        total_steps=plan.num_steps,
        stall_timeout_s=config.rollout.collect_timeout_s,
    )


def _trackers(config: Config, run_dir: RunDir, progress: Progress, num_steps: int):
    run = TrackedRun(
        directory=run_dir.path,
        name=run_dir.name,
        total_steps=num_steps,
        # A run that was killed before its first checkpoint starts over: nothing is kept.
        keep_through_step=(progress.step or -1) if config.trainer.resume else None,
        config=to_dict(config),
    )
    return closing(build_trackers(tracker_choices(config.telemetry), run, skip_missing=True))


def tracker_choices(config: TelemetryConfig) -> dict[str, Mapping[str, Any]]:
    """Return the trackers of a run with their arguments: those of every run, and those named."""
    found: dict[str, Mapping[str, Any]] = {name: {} for name in ("jsonl", *config.trackers)}
    return found | {"rich": {"quiet": config.quiet}}
