"""Every preset of the algorithm trains, by ``algo=NAME`` alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config.keys import config_dir
from agentrl.config.load import load
from agentrl.launch import open_trainer
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.trajectory_io import StoredTrajectory, iter_stored
from agentrl.train.learner import Learner
from agentrl.train.trainer import Trainer

PRESETS = sorted(path.stem for path in (config_dir() / "algo").glob("*.yaml"))
# Rewards by turn, so that every group has a signal. Two threads would only wait for each other.
SMALL = [
    "env.id=guess_number",
    "env.kwargs.turn_reward=1",
    "model.warm_start.steps=30",
    "model.warm_start.episodes_per_step=16",
    "trainer.prompts_per_step=4",
    "trainer.total_steps=2",
    "trainer.num_threads=1",
    "rollout.n=4",
    "eval.val_tasks=2",
    "eval.test_tasks=2",
    "telemetry={trackers: [], report: false, quiet: true}",
]


@dataclass(slots=True, kw_only=True)
class Run:
    """What two steps left behind."""

    path: Path
    learner: Learner
    has_moved: dict[str, bool]
    """By role: whether any weight changed."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of the training steps."""

    def stored(self) -> Iterator[StoredTrajectory]:
        """Everything that was sampled for training."""
        for step in (1, 2):
            yield from iter_stored(RunDir(self.path).trajectories_path(step))


@pytest.fixture(scope="module", autouse=True)
def shared_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One warm start for all presets; the number of threads is as before afterwards."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(num_threads)


async def train(path: Path, *overrides: str) -> Run:
    config = load([*SMALL, f"trainer.run_dir={path}", *overrides])
    async with open_trainer(config) as trainer:
        before = _weights(trainer)
        async with asyncio.timeout(200):
            await trainer.fit()
        moved = {
            role: any(not torch.equal(before[role][name], value) for name, value in after.items())
            for role, after in _weights(trainer).items()
        }
        assert isinstance(trainer.learner, Learner)
        run = Run(path=path, learner=trainer.learner, has_moved=moved)
    run.lines = [json.loads(line) for line in RunDir(path).metrics_path.open()][1:]
    return run


def _weights(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    return {
        role: {name: value.clone() for name, value in engine.export_params()}
        for role, engine in trainer.engines.items()
    }


def turn_advantages(stored: StoredTrajectory) -> list[np.ndarray]:
    """The advantages of every turn's sampled tokens."""
    assert stored.advantages is not None
    turns = stored.trajectory.turns
    return [stored.advantages[turn.segment][turn.start : turn.end] for turn in turns]


def credits_sessions(run: Run) -> None:
    """All tokens of a session have one advantage."""
    for stored in run.stored():
        assert len({float(value) for turn in turn_advantages(stored) for value in turn}) == 1


def credits_turns(run: Run) -> None:
    """Tokens of a turn share an advantage, which differs from turn to turn of some session."""
    differ = 0
    for stored in run.stored():
        by_turn = [np.unique(turn) for turn in turn_advantages(stored)]
        assert all(len(values) == 1 for values in by_turn)
        differ += len(np.unique(np.concatenate(by_turn))) > 1
    assert differ


def _loss(run: Run) -> str:
    return type(run.learner.token_loss).__name__


def grpo(run: Run) -> None:
    credits_sessions(run)
    assert (_loss(run), run.learner.algo.loss_agg) == ("Vanilla", "token-mean")


def dr_grpo(run: Run) -> None:
    credits_sessions(run)
    assert run.learner.algo.loss_agg == "seq-mean-token-sum-norm"
    assert run.learner.loss_agg_tokens == 512, "rollout.max_response_tokens"
    # Without the division an advantage stays within the range of the returns.
    assert all(abs(turn).max() <= 2 for s in run.stored() for turn in turn_advantages(s))


def dapo(run: Run) -> None:
    assert sum(line["group/refilled"] for line in run.lines) > 0
    assert all(line["actor/updates"] > 0 for line in run.lines)
    sampled = [line["group/zero_advantage_fraction"] for line in run.lines]
    assert max(sampled) > 0, "a group without signal was what another one took the place of"


def gspo(run: Run) -> None:
    credits_sessions(run)
    assert _loss(run) == "GSPO"
    # The ratio is a geometric mean over a sequence, with bounds of its scale: some are clipped.
    assert max(line["actor/pg_clipfrac"] for line in run.lines) > 0


def cispo(run: Run) -> None:
    credits_sessions(run)
    assert _loss(run) == "CISPO"


def rloo(run: Run) -> None:
    credits_sessions(run)
    groups: dict[str, list[float]] = {}
    for stored in run.stored():
        advantage = float(turn_advantages(stored)[0][0])
        groups.setdefault(stored.trajectory.group_id, []).append(advantage)
    assert all(abs(sum(group)) < 1e-5 for group in groups.values())


def opo(run: Run) -> None:
    credits_sessions(run)
    groups: dict[str, list[StoredTrajectory]] = {}
    for stored in run.stored():
        groups.setdefault(stored.trajectory.group_id, []).append(stored)
    for group in groups.values():
        returns = np.array([_return(stored) for stored in group])
        lengths = np.array([sum(map(len, turn_advantages(stored))) for stored in group])
        baseline = (lengths * returns).sum() / lengths.sum()
        found = [float(turn_advantages(stored)[0][0]) for stored in group]
        assert found == pytest.approx(list(returns - baseline), abs=1e-5)


def _return(stored: StoredTrajectory) -> float:
    trajectory = stored.trajectory
    assert trajectory.score is not None
    return trajectory.score.reward + sum(turn.reward for turn in trajectory.turns)


def remax(run: Run) -> None:
    for line in run.lines:
        assert line["group/greedy_failed"] == 0
        assert np.isfinite(line["reward/greedy_mean"])
    assert any(line["reward/greedy_mean"] != line["reward/mean"] for line in run.lines)


def reinforce_pp(run: Run) -> None:
    first, second = run.lines
    assert first["credit/ref_kl"] == 0, "the policy still was the reference"
    assert second["credit/ref_kl"] != 0
    assert first["actor/kl_coef"] == second["actor/kl_coef"] == 1e-3
    advantages = [line["credit/advantage_std"] for line in run.lines]
    assert advantages == pytest.approx([1, 1], abs=0.05), "normalised over the batch"


def gigpo(run: Run) -> None:
    credits_turns(run)
    anchors = [turn.anchor for stored in run.stored() for turn in stored.trajectory.turns]
    assert None not in anchors and len(set(anchors)) < len(anchors), "states were met again"


def turn_return(run: Run) -> None:
    credits_turns(run)
    masses = [line["credit/advantage_mass/turn_2"] for line in run.lines]
    assert all(0 < mass < 1 for mass in masses)


def learns_values(run: Run) -> None:
    first, second = run.lines
    for line in run.lines:
        # The recipe of the embedded model: four passes in two mini-batches.
        assert line["critic/updates"] == 8 and line["critic/skipped_updates"] == 0
        assert line["critic/lr"] == 2e-3 and line["critic/grad_norm"] > 0
        assert 0 <= line["critic/vf_clipfrac"] <= 1 and np.isfinite(line["critic/loss"])
    assert first["critic/explained_variance"] == 0, "a new value head says 0 of every state"
    assert second["critic/explained_variance"] not in (0, None)
    assert second["critic/vpred_mean"] != 0


def ppo(run: Run) -> None:
    learns_values(run)
    per_turn = [np.unique(turn) for stored in run.stored() for turn in turn_advantages(stored)]
    assert max(map(len, per_turn)) > 1, "tokens of a turn have advantages of their own"
    assert [line["credit/advantage_std"] for line in run.lines] == pytest.approx([1, 1], abs=0.05)


def turn_ppo(run: Run) -> None:
    learns_values(run)
    credits_turns(run)
    assert run.learner.algo.loss_agg == "turn-mean"


def bilevel(run: Run) -> None:
    learns_values(run)
    first_step = list(iter_stored(RunDir(run.path).trajectories_path(1)))
    # With values of 0 and no discount inside a turn its tokens share what the turn earned.
    for stored in first_step:
        assert all(np.ptp(turn) < 1e-6 for turn in turn_advantages(stored))
    assert any(np.ptp(turn) > 1e-3 for stored in run.stored() for turn in turn_advantages(stored))


CHECKS: dict[str, Callable[[Run], None]] = {
    "bilevel": bilevel,
    "cispo": cispo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gigpo": gigpo,
    "grpo": grpo,
    "gspo": gspo,
    "opo": opo,
    "ppo": ppo,
    "reinforce_pp": reinforce_pp,
    "remax": remax,
    "rloo": rloo,
    "turn_ppo": turn_ppo,
    "turn_return": turn_return,
}
OWN_SETTINGS = {
    # Without rewards by turn most groups of a model that can do little have no signal: refilled.
    "dapo": ["env.kwargs.turn_reward=0"],
    # Nothing is compared within groups: one sample of a prompt is enough.
    "ppo": ["rollout.n=1", "trainer.prompts_per_step=16"],
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_and_shows_its_own_parts(name: str, tmp_path: Path) -> None:
    run = asyncio.run(train(tmp_path / "run", f"algo={name}", *OWN_SETTINGS.get(name, [])))
    with_critic = {"critic"} if name in ("bilevel", "ppo", "turn_ppo") else set()
    assert run.has_moved == dict.fromkeys({"actor"} | with_critic, True), "weights that changed"
    assert [line["step"] for line in run.lines] == [1, 2]
    for line in run.lines:
        assert line["actor/updates"] == 2 and line["actor/skipped_updates"] == 0
        assert np.isfinite(line["actor/loss"]) and line["actor/grad_norm"] > 0
        assert abs(line["mismatch/k3_kl"]) < 1e-6
    CHECKS[name](run)
