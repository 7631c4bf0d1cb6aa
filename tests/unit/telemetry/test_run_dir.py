from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, DataError
from agentrl.telemetry.run_dir import RunDir, TrajectorySampling
from agentrl.telemetry.trajectory_io import read_trajectories
from agentrl.testing.run_data import make_trajectory


def test_create_refuses_a_directory_with_content_and_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty: it has no config\.yaml, .* remove what"):
        RunDir.create(tmp_path / "run")
    with RunDir.create(tmp_path / "run", exist_ok=True) as run:
        run.write_config("a: 1\n")
    with pytest.raises(ConfigError, match=r"not empty: resume it with trainer\.resume="):
        RunDir.create(tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_create_again_after_a_start_that_wrote_nothing(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run").close()
    RunDir.create(tmp_path / "run").close()


@pytest.mark.parametrize("name", ["checkpoints", "trajectories", "eval"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_computed(
    tmp_path: Path, name: str
) -> None:
    with RunDir.create(tmp_path / "run") as run:
        run.refuse_unwritable()
        (run.path / name).mkdir()
        run.refuse_unwritable()
        assert not list((run.path / name).iterdir()), "nothing is left behind"
        (run.path / name).rmdir()
        (run.path / name).symlink_to("/proc/self")  # nobody writes there, root neither
        with pytest.raises(ConfigError, match=rf"{name}' cannot be written .*trainer.run_dir"):
            run.refuse_unwritable()
        (run.path / name).unlink()
        (run.path / name).write_text("a file")
        with pytest.raises(ConfigError, match=rf"{name}' cannot be written \(Not a directory\)"):
            run.refuse_unwritable()


def test_metrics_that_cannot_be_appended_to_are_found_too(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as run:
        run.metrics_path.write_text('{"step": 0}\n')
        run.refuse_unwritable()
        assert run.metrics_path.read_text() == '{"step": 0}\n'
        run.metrics_path.unlink()
        run.metrics_path.mkdir()
        with pytest.raises(ConfigError, match=r"metrics.jsonl' cannot be written"):
            run.refuse_unwritable()


def test_named_runs_count_up_and_have_safe_names(tmp_path: Path) -> None:
    day = datetime.date(2031, 2, 3)
    with RunDir.create_named("code_sandbox", root=tmp_path, date=day) as one:
        assert one.name == "code_sandbox-20310203-1"
        with RunDir.create_named("code_sandbox", root=tmp_path, date=day) as two:
            assert two.name == "code_sandbox-20310203-2"
    with RunDir.create_named("./a/../my env.py:My/Env", root=tmp_path, date=day) as other:
        assert other.path.parent == tmp_path
        assert other.name == "My-Env-20310203-1"


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        RunDir.resume(tmp_path / "absent")


def test_a_second_writer_is_refused_in_this_process_and_in_another(tmp_path: Path) -> None:
    code = (
        "import sys; from agentrl.telemetry.run_dir import RunDir\n"
        "from agentrl.errors import ConfigError\n"
        "try: RunDir.resume(sys.argv[1])\n"
        "except ConfigError as error: print(error)\n"
        "else: print('locked')\n"
    )

    def other_process() -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    with RunDir.create(tmp_path):
        with pytest.raises(ConfigError, match="in this process"):
            RunDir.resume(tmp_path)
        assert f"pid {os.getpid()}" in other_process()
        RunDir(tmp_path).trajectory_steps()  # reading takes no lock
        assert "another process" in other_process()
    assert other_process() == "locked\n"
    RunDir.resume(tmp_path).close()


def test_a_forked_child_does_not_keep_the_run_locked(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # waits until the parent is done, holding all inherited descriptors
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        run.close()
        code = (
            "import sys; from agentrl.telemetry.run_dir import RunDir; RunDir.resume(sys.argv[1])"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


def test_config_round_trip_and_refusal_of_other_yaml(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.read_config() == {}
    run.write_config("env:\n  id: x\n")
    assert run.read_config() == {"env": {"id": "x"}}
    run.write_config("- 1\n")
    with pytest.raises(DataError, match="mapping"):
        run.read_config()
    run.write_config("a: [")
    with pytest.raises(DataError, match="YAML"):
        run.read_config()


def test_sampling_is_parsed_strictly() -> None:
    assert TrajectorySampling.parse("all").limit is None
    assert TrajectorySampling.parse("none").limit == 0
    assert TrajectorySampling.parse("sample:16").limit == 16
    for bad in ("sample", "sample:-1", "sample:x", "some", ""):
        with pytest.raises(ConfigError, match="sample:N"):
            TrajectorySampling.parse(bad)


def test_sampled_choice_ignores_the_order_of_arrival(tmp_path: Path) -> None:
    items = [make_trajectory(seed=i, identity=f"t{i}") for i in range(20)]
    run = RunDir(tmp_path)
    run.write_trajectories(1, items, sampling="sample:5")
    run.write_trajectories(2, items[::-1], sampling="sample:5")
    run.write_trajectories(3, items, sampling="none")
    first, second = (
        [t.id for t in read_trajectories(run.trajectories_path(step))] for step in (1, 2)
    )
    assert len(first) == 5 and len(second) == 5 and set(first) != set(second)
    again = TrajectorySampling.parse("sample:5").choose(items[::-1], 1)
    assert {t.id for t in again} == set(first)
    assert run.trajectory_steps() == [1, 2]


def test_rewind_deletes_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2, 3):
        run.write_trajectories(step, [make_trajectory(seed=step)])
        run.write_evaluation(step, [make_trajectory(seed=step)])
    run.rewind(2)
    assert run.trajectory_steps() == [1, 2] == run.eval_steps()
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == [
        "step_000001.jsonl",
        "step_000001.tokens.safetensors",
        "step_000002.jsonl",
        "step_000002.tokens.safetensors",
    ]


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir.create_named("guess_number", root=tmp_path / "runs")
    run.close()
    run.remove_if_empty()
    assert not (tmp_path / "runs").exists()


def test_a_run_that_began_stays(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write_config("env: {}")
    run.close()
    run.remove_if_empty()
    assert run.config_path.is_file()
