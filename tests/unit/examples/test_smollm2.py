"""The recipes of examples/smollm2 name settings that exist and can work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from agentrl.config.load import load
from agentrl.sft_start import sft_settings

FOLDER = Path(__file__).parents[3] / "examples" / "smollm2"


def commands(name: str) -> dict[str, list[str]]:
    """The verbs of a script -> their words, with ``$out`` as a folder of this machine."""
    text = (FOLDER / f"{name}.sh").read_text().replace("\\\n", " ").replace('"$@"', "")
    found = {}
    for line in text.splitlines():
        _, mark, rest = line.partition("agentrl ")
        if mark and not line.startswith("#"):
            verb, *words = shlex.split(rest.replace("$out", "/tmp/out"))
            found[verb] = words
    return found


@pytest.mark.parametrize("name", ["calculator", "code_sandbox"])
def test_both_stages_of_a_recipe_are_understood(name: str) -> None:
    stages = commands(name)
    supervised = [word for word in stages["sft"] if "=" in word]
    settings = sft_settings(supervised)
    trained = [word for word in stages["train"] if "=" in word]
    config = load([f"env.id={name}", *trained])
    assert config.rollout.engine.id == "vllm"
    assert stages["sft"][stages["sft"].index("--env") + 1] == name
    assert stages["sft"][stages["sft"].index("--out") + 1] == config.model.path
    assert settings.max_tokens <= config.rollout.max_context_tokens * 2
    assert config.rollout.max_turn_tokens < config.rollout.max_response_tokens
