"""How far sampling may run ahead, and what has to be done about the age of samples."""

from __future__ import annotations

import pytest

from agentrl.config.load import load
from agentrl.errors import ConfigError

SIZE = ["env.id=calculator", "trainer.prompts_per_step=8"]
DECOUPLED = ["algo.old_logprobs=recompute", "algo.correction.weight=token"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.window=-1"], r"rollout.window=-1: must be at least 0"),
        (["rollout.oversubscribe=-2"], r"rollout.oversubscribe=-2: must be at least 0"),
        (
            ["rollout.max_staleness=1", "rollout.oversubscribe=9", *DECOUPLED],
            r"oversubscribe=9 .*max_staleness=1 .*prompts_per_step=8 .*, 8, .*stragglers=cut",
        ),
        (["rollout.oversubscribe=1"], r"oversubscribe=1 .*max_staleness=0 .*raise .*max_staleness"),
        (
            ["rollout.stragglers=cut"],
            r"stragglers=cut with rollout.oversubscribe=null: .*such as 2",
        ),
        (
            ["rollout.stragglers=cut", "rollout.oversubscribe=2", "rollout.window=3"],
            r"window=3 with rollout.stragglers=cut: .*leave the window out",
        ),
        (
            ["rollout.stragglers=cut", "rollout.oversubscribe=1000000000"],
            r"oversubscribe=1000000000 with .*cut .*begun at once.*such as 2, and at most 1000000",
        ),
        (
            ["rollout.stragglers=cut", "rollout.max_staleness=1000000000", *DECOUPLED],
            r"oversubscribe=null with .*max_staleness=1000000000: .*begun at once",
        ),
        (["rollout.window=3"], r"window=3 with rollout.max_staleness=0: .*at least 1"),
        (
            ["rollout.max_staleness=1"],
            r"max_staleness=1 with algo.correction.weight=none .*set algo.old_logprobs=recompute "
            r"and algo.correction.weight=token",
        ),
        (
            ["rollout.max_staleness=1", "algo.old_logprobs=recompute"],
            r"algo.old_logprobs=recompute: .*set .*algo.correction.weight=token",
        ),
    ],
)
def test_what_cannot_keep_the_bound_is_refused_with_what_to_do(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load([*SIZE, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.max_staleness=4", "rollout.window=16", *DECOUPLED],
        ["rollout.max_staleness=1", "rollout.oversubscribe=3", *DECOUPLED],
        ["rollout.max_staleness=1", "algo.loss=reinforce", "algo.correction.weight=token"],
        ["rollout.stragglers=cut", "rollout.oversubscribe=3"],
        ["rollout.stragglers=cut", "rollout.oversubscribe=20"],
        ["rollout.stragglers=cut", "rollout.max_staleness=1", *DECOUPLED],
    ],
)
def test_what_can_is_not(overrides: list[str]) -> None:
    load([*SIZE, *overrides])
