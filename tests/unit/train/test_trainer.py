"""The loop with fakes for every part: what it does, in which order, and when it gives up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.batch import Batch
from agentrl.errors import Preempted, TrainingError
from agentrl.rollout.buffer import Lookahead, RolloutBuffer, Slot, Verdict
from agentrl.rollout.config import FailureConfig
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.producer import Producer
from agentrl.rollout.tasks import Dispatch, TaskStream
from agentrl.telemetry.meter import Meter
from agentrl.telemetry.run_dir import RunDir
from agentrl.train.assemble import TrainBatch, assemble
from agentrl.train.compute_thread import ComputeThread
from agentrl.train.config import TrainerConfig
from agentrl.train.evaluate import Evaluator, held_out_success
from agentrl.train.progress import Progress
from agentrl.train.trainer import Trainer
from agentrl.types import Task, TrajectoryGroup

TASKS = [Task(id=str(index), data={}) for index in range(8)]


class Events(list[str]):
    """What happened, in order; ``listener`` is told at once."""

    listener: Callable[[str], object] = staticmethod(lambda event: None)

    def append(self, event: str) -> None:
        super().append(event)
        self.listener(event)


class Parts:
    """Records what happens."""

    def __init__(self, tmp_path: Path, *, untrainable: set[int] | None = None) -> None:
        self.events = Events()
        self.hang_from = 10**9
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.saved: list[tuple[int, dict[str, Any]]] = []
        self.scores: list[float | None] = []
        self.sampled: list[tuple[int, int]] = []
        self.version = -1
        self.offloaded: list[int] = []
        """Versions after whose publishing the engine could leave the device."""
        self.fail_evaluation: Exception | None = None
        self.evaluations_hang = False
        """Those after the first step."""
        self.num_updates, self.num_skipped = 1, 0
        self.max_staleness = 0
        self.line: list[Slot] = []
        self.lines_saved: list[list[dict[str, Any]]] = []
        """Places of the line in each checkpoint."""
        self.untrainable = untrainable or set()
        self.batch = replace(
            assemble([], {}),
            batch=Batch.from_rows({"ids": [torch.zeros(3, dtype=torch.int64)]}),
        )
        self.metrics: list[dict[str, Any]] = []
        self.measured: dict[str, Any] = {}
        self.tmp_path = tmp_path

    async def run_group(self, dispatch: Dispatch) -> TrajectoryGroup:
        self.sampled.append((dispatch.index, self.version))
        await asyncio.sleep(3600 if dispatch.index >= self.hang_from else 0)
        return TrajectoryGroup(
            id=str(dispatch.index),
            task=dispatch.task,
            env_id="e",
            trajectories=[],
            policy_version=self.version,
            index=dispatch.index,
        )

    # The protocols of Weights, Placement, Checkpoints, Tracker and TrainEngine, as far as used.

    async def publish(self, *, version: int) -> dict[str, Any]:
        self.version = version
        self.events.append(f"publish {version}")
        return {}

    @asynccontextmanager
    async def training(self):
        self.events.append("training")
        yield

    def save(self, step: int, parts: Any, progress: dict[str, Any], *, score: float | None) -> None:
        assert parts["actor"] is self
        waiting = parts.get("waiting")
        self.lines_saved.append([] if waiting is None else waiting.save(self.tmp_path).places)
        self.events.append(f"save {step}")
        self.saved.append((step, progress))
        self.scores.append(score)

    def flush(self) -> None:
        self.events.append("flush")

    def offload(self) -> None:
        self.offloaded.append(self.version)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.events.append(f"log {step}")
        self.lines.append((step, metrics))

    def close(self) -> None:
        """Nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        return {"kl": 1.0}

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, Any]]:
        self.events.append("credit")
        return batch, {"credit/seen": 1}

    def measure_mismatch(self, batch: TrainBatch, step: int) -> dict[str, Any]:
        return self.measured

    def update(self, train_batch: TrainBatch, step: int) -> dict[str, Any]:
        self.events.append(f"update {step}")
        return self.metrics[step] if step < len(self.metrics) else {"actor/updates": 1}

    def judge(self, group: TrajectoryGroup) -> Verdict:
        failed = int(group.id) in self.untrainable
        return Verdict.FAILED if failed else Verdict.TRAINABLE

    def trainer(self, config: TrainerConfig, progress: Progress, failure: FailureConfig) -> Trainer:
        rules = Lookahead(
            prompts_per_step=config.prompts_per_step,
            max_staleness=self.max_staleness,
            total_steps=config.total_steps,
        )
        buffer = RolloutBuffer(rules, version=progress.step, line=self.line)

        feed = TaskFeed(TaskStream(TASKS, seed=0, source="t"), fingerprint="t")

        async def evaluate(split: str, dispatch: Dispatch) -> TrajectoryGroup:
            self.events.append(f"evaluate {split} {self.version}")
            if self.version and self.fail_evaluation is not None:
                raise self.fail_evaluation
            if self.version and self.evaluations_hang:
                await asyncio.sleep(3600)
            return await self.run_group(dispatch)

        return Trainer(
            config=config,
            failure=failure,
            collect_timeout_s=20,
            max_refills=0,
            progress=progress,
            engines={"actor": self},  # type: ignore[dict-item]
            learner=self,
            weights=self,
            placement=self,
            feed=feed,
            producer=Producer(feed, buffer, self.run_group, self.judge),
            buffer=buffer,
            assemble=lambda groups: self.batch,
            evaluator=Evaluator(
                evaluate,
                {"val": {"e": TASKS[:1]}, "test": {"e": TASKS[:1]}},
                every=config.eval_every,
                total_steps=config.total_steps,
                stall_timeout_s=20,
            ),
            checkpoints=self,
            run_dir=RunDir.create(self.tmp_path / "run"),
            tracker=self,  # type: ignore[arg-type]
            meter=Meter(),
            compute=ComputeThread(),
        )


def fit(
    parts: Parts,
    *,
    progress: Progress | None = None,
    failure: FailureConfig | None = None,
    **settings: Any,
) -> Progress:
    config = replace(TrainerConfig(prompts_per_step=2, eval_every=2, save_every=2), **settings)
    progress = progress or Progress()

    async def main() -> None:
        async with asyncio.timeout(30):
            await parts.trainer(config, progress, failure or FailureConfig()).fit()

    asyncio.run(main())
    return progress


def test_the_order_of_a_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    fit(parts, total_steps=3)
    assert parts.events == [
        "publish 0",
        "evaluate val 0",
        "evaluate test 0",
        "log 0",
        *("training", "credit", "update 0", "publish 1", "log 1"),
        *("training", "credit", "update 1", "publish 2", "evaluate val 2", "log 2", "save 2"),
        *("training", "credit", "update 2", "publish 3"),
        *("evaluate val 3", "evaluate test 3", "log 3", "save 3"),
        "flush",
    ]


def stopped(parts: Parts, *, when: str, **settings: Any) -> Progress:
    """Run until the event ``when``, ask for a stop there, and expect it to be obeyed."""
    config = replace(TrainerConfig(prompts_per_step=2, eval_every=0), **settings)
    progress = Progress()

    async def main() -> None:
        async with asyncio.timeout(30):
            trainer = parts.trainer(config, progress, FailureConfig())
            stop = partial(trainer.request_stop, "SIGTERM")
            loop = asyncio.get_running_loop()
            parts.events.listener = lambda event: event == when and loop.call_soon_threadsafe(stop)
            await trainer.fit()

    with pytest.raises(Preempted, match=r"stopped by SIGTERM after step .*train --resume .*run"):
        asyncio.run(main())
    return progress


def test_a_stop_while_collecting_saves_the_last_whole_step_as_it_was(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.hang_from = 4  # the groups of step 3 never finish
    stopped(parts, when="log 2", total_steps=9, save_every=9)
    assert parts.events[-2:] == ["save 2", "flush"]
    saved = parts.saved[-1][1]
    assert (saved["step"], saved["cursor"]) == (2, 4), "what was being collected is dealt again"
    assert saved["learner"] == {"kl": 1.0}


def test_a_stop_during_an_update_lets_the_step_finish(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    stopped(parts, when="update 1", total_steps=9, save_every=9)
    assert parts.events[-4:] == ["publish 2", "log 2", "save 2", "flush"]


def test_a_stop_is_obeyed_although_the_next_step_has_all_its_groups(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.max_staleness = 2  # sampling is ahead of training at all times
    progress = stopped(parts, when="log 3", total_steps=9, save_every=9)
    assert progress.step == 3 and parts.events[-2:] == ["save 3", "flush"]


def test_a_stop_does_not_hide_an_error_that_came_with_it(tmp_path: Path) -> None:
    parts = Parts(tmp_path)

    async def main() -> None:
        trainer = parts.trainer(TrainerConfig(), Progress(), FailureConfig())

        async def failing() -> None:
            trainer.request_stop("SIGTERM")
            raise TrainingError("no signal")

        await trainer.unless_stopped(failing())

    with pytest.raises(TrainingError, match="no signal"):
        asyncio.run(main())


def test_a_stop_at_a_saved_step_does_not_save_it_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.hang_from = 4
    stopped(parts, when="save 2", total_steps=9, save_every=2)
    assert parts.events.count("save 2") == 1 and parts.events[-1] == "flush"


def test_a_stop_during_an_evaluation_gives_it_up_and_keeps_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(tmp_path)
    parts.evaluations_hang = True
    stopped(parts, when="evaluate val 2", total_steps=9, save_every=9, eval_every=2)
    assert parts.events[-4:] == ["evaluate val 2", "log 2", "save 2", "flush"]
    assert parts.saved[-1][1]["cursor"] == 4 and parts.scores == [None]
    assert "evaluation after step 2 is given up (SIGTERM): " in caplog.text


def test_an_evaluation_that_fails_ends_the_run_with_its_last_step_saved(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.fail_evaluation = TrainingError("most episodes failed")
    with pytest.raises(ExceptionGroup) as caught:
        fit(parts, total_steps=9, save_every=0)
    assert caught.value.exceptions == (parts.fail_evaluation,)
    assert parts.events[-4:] == ["evaluate val 2", "log 2", "save 2", "flush"]
    assert parts.saved[-1][0] == 2 and parts.saved[-1][1]["cursor"] == 4


def test_the_time_of_a_save_counts_once(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    fit(parts, total_steps=5, eval_every=0, save_every=2)
    waited = [line["timing_s/save"] > 0 for _, line in parts.lines if "step" in line]
    assert waited == [False, False, True, False, True]


def test_engines_may_leave_the_device_once_their_weights_are_sampled(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    fit(parts, total_steps=2, eval_every=0)
    assert parts.offloaded == [0, 1, 2]


def test_a_stop_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.hang_from = 0
    stopped(parts, when="publish 0", total_steps=9)
    assert not parts.saved


def test_a_checkpoint_knows_the_success_that_was_measured_at_its_step(tmp_path: Path) -> None:
    found = {"val/a/success": 0.5, "val/b/success": 1.0, "test/a/success": 0.0}
    assert held_out_success(found) == 0.75
    assert held_out_success({"test/a/success": 1.0}) is None


def test_synchronous_episodes_are_sampled_by_the_version_they_train(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    progress = fit(parts, total_steps=3, eval_every=0)
    by_index: dict[int, list[int]] = {}
    for index, version in parts.sampled:
        by_index.setdefault(version, []).append(index)
    assert by_index[1] == [2, 3] and by_index[2] == [4, 5]
    assert progress.cursor == 6


def test_a_resumed_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    fit(parts, progress=Progress(step=2, cursor=4), total_steps=3, eval_every=0)
    assert parts.events[0] == "publish 2"
    assert "log 0" not in parts.events, "the evaluation before training is not repeated"
    assert [index for index, version in parts.sampled if version == 2] == [4, 5]
    assert parts.saved == [
        (
            3,
            {
                "step": 3,
                "cursor": 6,
                "empty_steps": 0,
                "skipped_updates": 0,
                "mismatch_warnings": 0,
                "learner": {"kl": 1.0},
                "feed": {"tasks": "t", "epoch": 0, "curriculum": None},
            },
        )
    ]


def test_a_run_that_samples_ahead_keeps_its_bound_and_saves_its_line(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.max_staleness = 2
    progress = fit(parts, total_steps=5, eval_every=0, save_every=1)
    dispatched_at = dict(parts.sampled)
    for index, version in dispatched_at.items():
        assert index // 2 - version <= 2
    assert max(index // 2 - version for index, version in dispatched_at.items()) == 2
    assert sorted(dispatched_at) == list(range(10)), "what no step could train was sampled"
    assert progress.cursor == 10
    waiting = [len(line) for line in parts.lines_saved]
    assert waiting == [4, 4, 4, 2, 0]
    assert [saved["cursor"] for _, saved in parts.saved] == [6, 8, 10, 10, 10]


def test_a_stop_saves_what_has_finished_since_the_last_whole_step_was_noted(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    parts.max_staleness = 2
    parts.hang_from = 7  # of step 4: its other group, 6, finishes
    stopped(parts, when="log 3", total_steps=9, save_every=9)
    assert parts.saved[-1][1]["cursor"] == 10
    finished = [place["group"] is not None for place in parts.lines_saved[-1]]
    assert finished == [True, False, False, False]


def test_untrainable_groups_are_refilled_within_the_step_and_move_the_cursor(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path, untrainable={0, 3})
    progress = fit(parts, total_steps=2, eval_every=0)
    assert progress.cursor == 6
    assert parts.lines[1][1]["group/refilled"] == 1


def test_steps_without_a_signal_are_counted_and_end_the_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.batch = replace(
        assemble([], {}), batch=None, why_empty="2 of 2 groups without a difference"
    )
    with pytest.raises(TrainingError, match=r"3 steps in a row .*2 of 2 groups.*rollout.n"):
        fit(parts, total_steps=9, failure=FailureConfig(max_empty_steps=3))
    assert [event for event in parts.events if event.startswith("publish")][-1] == "publish 2"


def test_steps_of_which_every_token_was_rejected_are_steps_without_a_signal(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    nothing, something = {"actor/updates": 0}, {"actor/updates": 1}
    parts.metrics = [nothing, something, nothing, nothing]
    with pytest.raises(TrainingError, match=r"2 steps in a row .*algo.correction rejected every"):
        fit(parts, total_steps=9, eval_every=0, failure=FailureConfig(max_empty_steps=2))
    assert [line.get("group/empty_steps") for _, line in parts.lines if "step" in line] == [
        1,
        None,
        1,
    ]


def test_gradients_that_are_not_finite_in_a_row_end_the_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    bad = {"actor/updates": 2, "actor/skipped_updates": 2}
    half = {"actor/updates": 2, "actor/skipped_updates": 1}
    parts.metrics = [bad, half, bad, bad]
    with pytest.raises(TrainingError, match=r"4 updates in a row .*last step: 4\).*actor.lr"):
        fit(parts, total_steps=9, failure=FailureConfig(max_skipped_updates=4))


def test_a_trainer_that_has_another_policy_than_the_engine_ends_the_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    near, far = ({"actor/updates": 1, "mismatch/k3_kl": kl} for kl in (0.4, 0.6))
    parts.metrics = [near, near, far]
    with pytest.raises(
        TrainingError, match=r"update of step 3 .* 0.6 nats .*failure.max_mismatch_kl=0.5: weights"
    ):
        fit(parts, total_steps=9)
    strict = Parts(tmp_path / "strict")
    strict.metrics = [{"actor/updates": 1, "mismatch/k3_kl": 2e-6}]
    with pytest.raises(TrainingError, match="max_mismatch_kl=1e-06"):
        fit(strict, total_steps=9, failure=FailureConfig(max_mismatch_kl=1e-6))


@pytest.mark.parametrize(
    ("current", "whole", "stops"),
    [(None, 3.0, False), (0.1, 3.0, False), (0.6, 0.4, True), (None, math.inf, True)],
)
def test_what_was_learned_since_older_tokens_were_sampled_is_no_mismatch(
    tmp_path: Path, current: float | None, whole: float, stops: bool
) -> None:
    parts = Parts(tmp_path)
    found = {"mismatch/k3_kl": whole, "mismatch/current_fraction": 0.0 if current is None else 0.5}
    if current is not None:
        found["mismatch/current/k3_kl"] = current
    parts.metrics = [{"actor/updates": 1, **found}]
    expected = pytest.raises(TrainingError, match="max_mismatch_kl=0.5") if stops else nullcontext()
    with expected:
        fit(parts, total_steps=1)


def test_a_producer_that_dies_ends_the_run_with_its_error(tmp_path: Path) -> None:
    parts = Parts(tmp_path)

    async def broken(dispatch: Dispatch) -> TrajectoryGroup:
        raise ValueError("a broken invariant")

    parts.run_group = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a broken invariant"):
        fit(parts, total_steps=2, eval_every=0, progress=Progress(step=1, cursor=2))


def test_a_run_of_which_every_update_was_skipped_is_no_success(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.num_updates, parts.num_skipped = 0, 2
    with pytest.raises(TrainingError, match="nothing was trained: all 2 updates"):
        fit(parts, total_steps=1, eval_every=0)
    assert parts.saved, "the checkpoint is there to look at"


def start(value: float, **more: float) -> dict[str, float]:
    """What the first step measured before its update."""
    return {"mismatch/k3_kl": 0.01, "mismatch/exp_abs_mean": value, **more}


def test_a_first_step_with_a_mismatch_trains_nothing_and_leaves_its_tokens(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.measured = start(1.16)
    with pytest.raises(TrainingError, match=r"factor of 1.16 .*max_start_mismatch=1.15.*agentrl"):
        fit(parts, total_steps=9)
    assert not [event for event in parts.events if event.startswith("update")]
    assert RunDir(tmp_path / "run").trajectory_steps() == [1]
    parts = Parts(tmp_path / "again")
    parts.measured = start(1.16)
    fit(parts, total_steps=1, failure=FailureConfig(max_start_mismatch=1.2))


@pytest.mark.parametrize(("value", "said"), [(1.0 + 1e-9, "1 \\+ 1e-09"), (float("nan"), "nan")])
def test_a_limit_of_1_allows_no_difference_at_the_start(
    tmp_path: Path, value: float, said: str
) -> None:
    strict = FailureConfig(max_start_mismatch=1.0)
    parts = Parts(tmp_path / "equal")
    parts.measured = start(1.0)
    fit(parts, total_steps=1, failure=strict)
    parts = Parts(tmp_path / "other")
    parts.measured = start(value)
    with pytest.raises(TrainingError, match=f"factor of {said} .*max_start_mismatch=1:"):
        fit(parts, total_steps=1, failure=strict)


def test_tokens_of_older_versions_alone_do_not_stop_the_first_step(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.measured = start(1.4, **{"mismatch/current_fraction": 0.0})
    fit(parts, total_steps=1)
    parts = Parts(tmp_path / "mixed")
    mixed = {"mismatch/current_fraction": 0.5, "mismatch/current/exp_abs_mean": 1.3}
    parts.measured = start(1.4, **mixed)
    with pytest.raises(TrainingError, match="factor of 1.3 "):
        fit(parts, total_steps=1)


def test_later_steps_with_a_mismatch_are_warned_of_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(tmp_path)
    good, bad = ({"actor/updates": 1, **start(value)} for value in (1.01, 1.2))
    parts.metrics = [good, bad, good, bad]
    progress = fit(parts, total_steps=4, eval_every=0)
    counts = [line["mismatch/warnings"] for _, line in parts.lines if "step" in line]
    assert counts == [0, 1, 1, 2] and progress.mismatch_warnings == 2
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "step 2:" in record.message and "factor of 1.2 " in record.message
