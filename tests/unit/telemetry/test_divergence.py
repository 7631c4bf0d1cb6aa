"""Where engine and trainer part is found in what a run has stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.telemetry.divergence import divergences, quiet_decoder, run_divergences
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.trajectory_io import StoredTrajectory, iter_stored, write_trajectories
from agentrl.testing.run_data import make_trainer_logprobs, make_trajectory
from agentrl.types import Trajectory


def sampled_places(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(turn, position) of every sampled token."""
    return [(t.index, p) for t in trajectory.turns for p in range(t.start, t.end)]


def stored(trajectory: Trajectory, scored: list[np.ndarray] | None) -> StoredTrajectory:
    return StoredTrajectory(trajectory=trajectory, advantages=None, trainer_logprobs=scored)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_corrupted_logprob_is_found_at_exactly_its_token(data: st.DataObject) -> None:
    trajectory = make_trajectory(seed=data.draw(st.integers(0, 20)), num_turns=3)
    scored = make_trainer_logprobs([trajectory], seed=1)[trajectory.id]
    turn, position = data.draw(st.sampled_from(sampled_places(trajectory)))
    scored[0][position] += data.draw(st.sampled_from([-3.0, 0.2, 1.0]))
    (found,) = divergences([stored(trajectory, scored)])
    assert found.first == found.worst
    assert (found.worst.turn, found.worst.position) == (turn, position)
    assert found.worst.index == position - trajectory.turns[turn].start
    assert found.worst.token_id == trajectory.segments[0].ids[position]
    assert found.worst.engine == pytest.approx(float(trajectory.segments[0].logprobs[position]))
    assert found.worst.trainer == pytest.approx(float(scored[0][position]))


def test_the_first_token_above_the_threshold_need_not_be_the_worst() -> None:
    trajectory = make_trajectory(seed=3, num_turns=2)
    scored = make_trainer_logprobs([trajectory], seed=1, noise=0.0)[trajectory.id]
    early, late = sampled_places(trajectory)[2], sampled_places(trajectory)[-1]
    scored[0][early[1]] += 0.2
    scored[0][late[1]] -= 0.9
    (found,) = divergences([stored(trajectory, scored)], threshold=0.1)
    assert found.first is not None and found.first.position == early[1]
    assert found.worst.position == late[1]
    assert found.worst.difference == pytest.approx(-0.9, abs=1e-5)
    count = len(sampled_places(trajectory))
    assert (found.num_tokens, found.abs_mean) == (count, pytest.approx(1.1 / count, rel=1e-4))
    (strict,) = divergences([stored(trajectory, scored)], threshold=1.0)
    assert strict.first is None


def test_tokens_that_the_trainer_did_not_score_are_left_out() -> None:
    trajectory = make_trajectory(seed=3, num_turns=2)
    assert list(divergences([stored(trajectory, None)])) == []
    scored = [np.full(len(trajectory.segments[0]), np.nan, np.float32)]
    position = trajectory.turns[1].start
    scored[0][position] = trajectory.segments[0].logprobs[position]
    (found,) = divergences([stored(trajectory, scored)])
    assert found.num_tokens == 1 and found.worst.turn == 1


def test_what_is_no_number_is_the_worst_of_all() -> None:
    trajectory = make_trajectory(seed=3, num_turns=1)
    scored = make_trainer_logprobs([trajectory], seed=1)[trajectory.id]
    position = trajectory.turns[0].start + 1
    trajectory.segments[0].logprobs[position] = -np.inf
    scored[0][position] = -np.inf
    (found,) = divergences([stored(trajectory, scored)])
    assert found.worst.position == position and found.first == found.worst


def test_the_trainers_logprobs_survive_the_disk(tmp_path: Path) -> None:
    known, unknown = make_trajectory(seed=1), make_trajectory(seed=2)
    scored = make_trainer_logprobs([known], seed=4)
    path = tmp_path / "step_000001.jsonl"
    write_trajectories(path, [unknown, known], trainer_logprobs=scored)
    first, second = iter_stored(path)
    assert first.trainer_logprobs is None
    assert second.trainer_logprobs is not None
    np.testing.assert_array_equal(second.trainer_logprobs[0], scored[known.id][0])


def test_files_of_a_time_without_the_trainers_logprobs_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "step_000001.jsonl"
    write_trajectories(path, [make_trajectory(seed=1)])
    tokens = tmp_path / "step_000001.tokens.safetensors"
    arrays = {n: v for n, v in load_file(tokens).items() if n != "trainer_logprobs"}
    save_file(arrays, tokens)
    assert next(iter_stored(path)).trainer_logprobs is None


def test_a_step_of_a_run_lists_the_worst_trajectories_first(
    finished_run: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(finished_run.path, tmp_path / "run"))
    step = run.trajectory_steps()[-1]
    path = run.trajectories_path(step)
    members = [item.trajectory for item in iter_stored(path)]
    scored = make_trainer_logprobs(members, seed=0)
    broken = members[3]
    place = broken.turns[-1].start
    scored[broken.id][0][place] -= 2.0
    write_trajectories(path, members, trainer_logprobs=scored)
    found = run_divergences(run, step, top=2, decoder=quiet_decoder(run))
    assert len(found) == 2 and found[0].id == broken.id
    assert found[0].worst.position == place and found[0].worst.text
    with pytest.raises(DataError, match="holds no trajectories of step 99; there are"):
        run_divergences(run, 99)


def test_the_command_names_the_token(finished_run: RunDir) -> None:
    from click.testing import CliRunner

    from agentrl.cli.mismatch import command

    out = CliRunner().invoke(command, [str(finished_run.path), "--threshold", "1e-9"])
    assert out.exit_code == 0
    assert "first above 1e-09: turn 1, token 0:" in out.output
    assert "trainer -" in out.output and "engine -" in out.output
    listed = CliRunner().invoke(command, [str(finished_run.path), "--top", "1", "--json"])
    (row,) = json.loads(listed.output)["trajectories"]
    assert row["worst"]["text"] and row["first"] is None
