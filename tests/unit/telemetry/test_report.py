from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentrl.errors import DataError
from agentrl.telemetry.report import render_report
from agentrl.telemetry.report_trajectories import MAX_TOKENS
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.trajectory_io import (
    read_trajectories,
    tokens_path,
    write_trajectories,
)
from agentrl.testing.run_data import make_task, make_trajectory
from agentrl.testing.synthetic_run import write_synthetic_run
from agentrl.types import StopReason, Task

HOSTILE = "</span></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'>{{ 7 * 7 }}"
VOID = {"meta", "circle", "line", "path", "rect", "input", "img", "br", "link"}


class Page(HTMLParser):
    """Elements, attributes and text of a page; checks that elements are nested properly."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def _render(run: RunDir) -> tuple[Page, str]:
    html = render_report(run).read_text(encoding="utf-8")
    return Page(html), html


def _assert_safe(page: Page) -> None:
    assert page.tags.count("script") == 1
    assert not {"img", "iframe", "object", "link", "base", "form", "a"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "href", "srcset", "xlink:href", "action"), (tag, name)
        assert "url(" not in value


def test_the_page_tells_what_happened(finished_run: RunDir) -> None:
    page, html = _render(finished_run)
    words = page.words
    for part in (
        "finished, 8 steps",
        "success, validation",
        "success, training",
        "Where the time goes",
        "collect",
        "How trajectories ended",
        "terminated",
        "Tools",
        "python",
        "Censoring",
        "Evaluation on the validation split",
        "level=1",
        "Trajectories",
        "Resolved configuration",
        "retry_fresh",
    ):
        assert part in words, part
    shown = re.findall(r'class="why">([^<]*)<', html)
    assert [why for why in shown if why != "failed"] == ["best", "worst", "random", "first step"]
    assert page.tags.count("svg") == 16
    _assert_safe(page)


def test_a_run_whose_length_its_epochs_decide_is_not_called_finished(own_run: RunDir) -> None:
    own_run.write_config("trainer: {total_steps: 0, epochs: 2.0}")
    page, _ = _render(own_run)
    assert "3 steps" in page.words and "finished," not in page.words


def test_numbers_on_the_page_are_those_of_the_files(finished_run: RunDir) -> None:
    page, _ = _render(finished_run)
    lines = [json.loads(line) for line in finished_run.metrics_path.read_text().splitlines()]
    key = "val/code_sandbox/success"
    assert f"{lines[0][key]:.3f} → {lines[-1][key]:.3f}" in page.words
    last = read_trajectories(finished_run.trajectories_path(8))
    best = max(item.total_reward for item in last if not item.failed)
    assert f"step 8 · reward {best:.3f}" in page.words


def test_calls_of_made_up_tools_do_not_look_like_a_tool(own_run: RunDir) -> None:
    with own_run.metrics_path.open("a") as file:
        file.write('{"step": 4, "tool/unknown/calls": 3, "tool/unknown/errors": 3}\n')
    page, _ = _render(own_run)
    assert "(no such tool) 3 3" in page.words and "unknown" not in page.words


def test_stop_reasons_have_a_legend_even_with_one_reason(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stop_reason/terminated": 1.0}\n')
    _, html = _render(RunDir(tmp_path))
    (figure,) = re.findall(r"<figure.*?</figure>", html, re.DOTALL)
    assert '<i class="key c0"></i>terminated' in figure


def test_splits_are_evaluated_apart(own_run: RunDir) -> None:
    for step, solved in ((0, False), (3, True)):
        items = [
            make_trajectory(
                seed=i,
                task=make_task(i),
                identity=f"{split}{i}",
                group_id=f"eval-{split}-{i}",
                success=solved and split == "test",
            )
            for split in ("val", "test")
            for i in range(4)
        ]
        own_run.write_evaluation(step, items)
    page, _ = _render(own_run)
    test, validation = page.words.split("Evaluation on the ")[1:]
    assert test.startswith("test split") and "paired over 4 tasks: +1.000" in test
    assert validation.startswith("validation split") and "4 tasks: +0.000" in validation


def test_tokens_carry_what_training_saw(own_run: RunDir) -> None:
    page, _ = _render(own_run)
    tips = {value for tag, name, value in page.attributes if name == "data-t"}
    sampled = [tip.split("|") for tip in tips if "|" in tip]
    assert sampled and any("|" not in tip for tip in tips)
    assert all(len(fields) == 5 and float(fields[1]) <= 0 for fields in sampled)
    shown = {int(tip.split("|")[0]) for tip in tips}
    (first, *_) = read_trajectories(own_run.trajectories_path(3))
    assert set(first.segments[0].ids[:10].tolist()) <= shown


def test_the_page_loads_nothing_and_runs_only_its_own_script(finished_run: RunDir) -> None:
    _, html = _render(finished_run)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert policy and script
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy.group(1)
    assert "default-src 'none'" in policy.group(1)
    assert not re.search(r"https?://", html)


def test_markup_from_tools_models_and_configs_stays_text(tmp_path: Path) -> None:
    run = write_synthetic_run(
        tmp_path / "<b>run", num_steps=2, num_eval_tasks=3, prompts_per_step=2, tool_output=HOSTILE
    )
    run.write_config(json.dumps({"env": {"id": HOSTILE}, "model": {"path": [HOSTILE]}, HOSTILE: 1}))
    plain = make_task(0)
    task = Task(id="t", data=plain.data, tags={HOSTILE: HOSTILE})
    failed = make_trajectory(
        seed=0,
        task=task,
        identity=HOSTILE,
        env_id=HOSTILE,
        stop_reason=StopReason.ENV_ERROR,
        tool_output=HOSTILE,
        num_turns=3,
    )
    failed.error = HOSTILE
    failed.turns[0].error = HOSTILE
    failed.turns[0].tool_results[0].name = HOSTILE
    run.write_trajectories(3, [failed])
    run.write_evaluation(3, [make_trajectory(seed=1, task=task, env_id=HOSTILE)])
    line = {
        "step": 3,
        f"tool/{HOSTILE}/calls": 1,
        f"stop_reason/{HOSTILE}": 1.0,
        f"val/{HOSTILE}/success": 0.5,
        f"censoring/{HOSTILE}/tokens<=64/masked/{HOSTILE.replace('/', '-')}": 1,
        "timing_s/step": 2.0,
        f"timing_s/{HOSTILE.replace('/', '-')}": 1.0,
    }
    with run.metrics_path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with_tokens, _ = _render(run)
    shutil.rmtree(run.model_path)
    as_messages, _ = _render(run)
    assert "without tokens" in as_messages.words
    for page in (with_tokens, as_messages):
        _assert_safe(page)
        assert "alert(1)" in page.words and "{{ 7 * 7 }}" in page.words


def test_control_characters_and_half_surrogates_do_not_break_the_page(own_run: RunDir) -> None:
    text = "\x1b[31mred\x00 \u202eevil \ud800"
    shutil.rmtree(own_run.model_path)  # byte-level tokens cannot hold half a surrogate
    item = make_trajectory(seed=0, num_turns=2)
    item.messages[-1]["content"] = text
    item.error = text
    own_run.write_trajectories(4, [item])
    page, html = _render(own_run)
    assert "\\u{1b}[31mred" in page.words
    assert not re.search("[\x00\x1b\u202e]", html)


def test_a_crashed_run_is_shown_up_to_where_it_came(own_run: RunDir) -> None:
    with own_run.metrics_path.open("a") as file:
        file.write('{"step": 4, "rewa')
    own_run.trajectories_path(4).with_suffix(".tokens.safetensors").write_bytes(b"half")
    page, _ = _render(own_run)
    assert "3 of 5 steps" in page.words
    assert "best" in page.words and "notice" not in {value for _, _, value in page.attributes}


def test_what_is_damaged_is_named_and_the_rest_is_shown(own_run: RunDir) -> None:
    tokens_path(own_run.trajectories_path(1)).unlink()
    own_run.write_config("a: [")
    own_run.eval_path(3).write_text("{}\n")
    tokens_path(own_run.eval_path(3)).write_bytes(b"")
    page, _ = _render(own_run)
    for part in ("step_000001", "config.yaml", "step_000003.jsonl"):
        assert part in page.words, part
    assert "best" in page.words and "Where the time goes" in page.words


def test_an_empty_run_still_gives_a_page(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "new") as run:
        page, _ = _render(run)
    assert "no metrics" in page.words and "0 steps" in page.words
    with pytest.raises(DataError, match="no run directory"):
        render_report(tmp_path / "absent")


def test_long_trajectories_are_cut_with_a_count(own_run: RunDir) -> None:
    item = make_trajectory(seed=0, num_turns=2, tool_output="word " * MAX_TOKENS)
    hidden = len(item.segments[0]) - MAX_TOKENS
    own_run.write_trajectories(4, [item])
    page, _ = _render(own_run)
    assert f"{hidden:,} further tokens" in page.words


def test_the_same_run_gives_the_same_page(own_run: RunDir) -> None:
    assert _render(own_run)[1] == _render(own_run)[1]


def test_the_tokens_on_which_engine_and_trainer_part_are_named(own_run: RunDir) -> None:
    page, html = _render(own_run)
    assert "Engine against trainer" in page.words
    assert "furthest apart first" in page.words
    assert html.count(">largest</td>") == 5
    # A sampled token of the viewer says both: id, engine, version, advantage, trainer.
    cells = [value for _, name, value in page.attributes if name == "data-t" and "|" in value]
    assert any(len(cell.split("|")) == 5 and cell.split("|")[4] for cell in cells)


def test_a_run_that_measured_nothing_has_no_table_of_it(own_run: RunDir) -> None:
    for step in own_run.trajectory_steps():
        path = own_run.trajectories_path(step)
        write_trajectories(path, read_trajectories(path))
    page, _ = _render(own_run)
    assert "Engine against trainer" not in page.words
