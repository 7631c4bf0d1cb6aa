from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.extras import missing_extra

ROOT = Path(__file__).parents[2]
TEXTS = (".md", ".py", ".yaml", ".sh", ".toml", ".html")
FOREIGN = re.compile(r"pip install (-\S+ )*['\"]?agentrl\b|['\"`]agentrl\[")


def test_what_is_missing_is_installed_from_a_checkout() -> None:
    assert missing_extra("ray", "cluster=ray") == (
        "cluster=ray needs the extra 'ray', which is missing; in a checkout of agentrl: "
        "pip install -e '.[ray]'"
    )


@pytest.mark.parametrize(
    "folder", ["agentrl", "configs", "docs", "envs", "examples", "sandboxes", "tools", "README.md"]
)
def test_nothing_tells_a_user_to_install_the_package_of_that_name_in_the_index(folder: str) -> None:
    top = ROOT / folder
    files = [top] if top.is_file() else [p for p in top.rglob("*") if p.suffix in TEXTS]
    wrong = [str(path) for path in files if FOREIGN.search(path.read_text(encoding="utf-8"))]
    assert files and not wrong
    assert FOREIGN.search("pip install 'agentrl[ray]'") and FOREIGN.search("pip install agentrl")
