from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.bench.fixed_work import FixedWork
from agentrl.cli.options import check_out_dir, quote
from agentrl.config.load import composed
from agentrl.errors import ConfigError


def arrives_as(value: str) -> str:
    return composed([f"model.path={quote(value)}"]).model.path


@pytest.mark.parametrize(
    "value", ["it's", "a\\b", "a\\", "a\\'b", "a\\\\'", "${x}", "\\${x}", "a,b=c:{d}", " a ", ""]
)
def test_a_quoted_value_arrives_as_it_is(value: str) -> None:
    assert arrives_as(value) == value


def test_half_an_interpolation_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="no viable alternative"):
        arrives_as("${")


def test_paths_of_benchmarks_are_quoted_too() -> None:
    config = FixedWork().config(Path("it's"), Path("run's"))
    assert (config.model.path, config.trainer.run_dir) == ("it's", "run's")


def test_a_directory_in_which_a_process_was_killed_is_taken_again(tmp_path: Path) -> None:
    (tmp_path / ".writing" / "weights").mkdir(parents=True)
    check_out_dir(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        check_out_dir(tmp_path)
