"""What a policy is played with that stands in a run."""

from __future__ import annotations

from pathlib import Path

import yaml

from agentrl.config.load import load, to_dict
from agentrl.play import playing_config


def test_a_run_brings_its_template_with_its_tokenizer(tmp_path: Path) -> None:
    settings = ["env.id=guess_number", "model.path=some/model", "model.chat_template=gone.jinja"]
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(load(settings))))
    run = str(tmp_path)
    assert playing_config(None, run, []).model.chat_template is None
    given = playing_config(None, run, ["model.chat_template=other.jinja"])
    assert given.model.chat_template == "other.jinja"
