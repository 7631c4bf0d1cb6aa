"""Pages and examples that could fall behind the code."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.overrides import checked, itemised, parse
from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig

ROOT = Path(__file__).parents[2]
# With placeholders among their settings.
PLACEHOLDERS = {"benchmarks.md"}
PAGES = sorted(
    page
    for pattern in ("README.md", "docs/*.md", "envs/*/*/README.md", "examples/*/README.md")
    for page in ROOT.glob(pattern)
    if page.name not in PLACEHOLDERS
)
SETTING = re.compile(r"[\w.]+=.*", re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in a block of a page, continued lines joined."""
    for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), flags=re.DOTALL):
        begun = ""
        for line in block.replace("\\\n", " ").splitlines():
            begun += f"\n{line}" if begun else line
            try:
                words = shlex.split(begun, comments=True)
            except ValueError:  # a quotation that goes on
                continue
            begun = ""
            if words[:1] == ["agentrl"]:
                yield words


def test_the_page_of_settings_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "configuration_page.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_settings_that_the_pages_write_can_be_read_and_exist() -> None:
    verbs = {"train", "eval", "rollout", "doctor"}
    found = [words for page in PAGES for words in commands(page) if words[1:2][0] in verbs]
    settings = [word for words in found for word in words if SETTING.fullmatch(word)]
    assert len(found) > 40 and len(settings) > 80
    for setting in parse(itemised(settings)):
        checked(setting)


def test_the_minimal_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "minimal_grpo.py"]
        + ["--steps", "2", "--prompts", "2", "--samples", "4", "--warm-steps", "20"],
        env=os.environ | {"AGENTRL_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step ") == 2 and "after:" in done.stdout


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "Echo"), ("docs/environments.md", "HigherLower")]
)
def test_the_environments_of_the_pages_keep_the_contract(
    page: str, name: str, tmp_path: Path
) -> None:
    blocks = (ROOT / page).read_text().split("```python\n")[1:]
    (code,) = (block.split("```")[0] for block in blocks if f"class {name}(" in block)
    file = tmp_path / "mine.py"
    file.write_text(code)
    assert asyncio.run(check_env(EnvConfig(id=f"{file}:{name}"))) == []
