from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from agentrl.errors import DataError
from agentrl.telemetry.curves import render_curves
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import MissingExtraError


def test_draws_a_picture_with_content(own_run: RunDir) -> None:
    path = render_curves(own_run)
    assert path == own_run.curves_path
    pixels = image.imread(path)
    assert pixels.shape[0] > 800 and pixels.shape[1] > 1200
    assert pixels[..., :3].std() > 0.05


def test_one_step_is_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5, "timing_s/step": 1.0, "stop_reason/terminated": 1.0}\n'
    )
    assert render_curves(tmp_path).is_file()


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metrics"):
        render_curves(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "note": "x"}\n')
    with pytest.raises(DataError, match="yet"):
        render_curves(tmp_path)


def test_a_missing_extra_is_named(own_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"'\.\[report\]'"):
        render_curves(own_run)


def test_steps_are_whole_numbers_and_stop_reasons_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "stop_reason/terminated": 1.0}}\n' for step in (1, 2))
    )
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))[1]
    )
    render_curves(tmp_path)
    ax = drawn[0].axes[0]
    assert all(tick == int(tick) for tick in ax.get_xticks())
    legend = ax.get_legend()
    assert legend is not None and [text.get_text() for text in legend.texts] == ["terminated"]
