"""Does credit per turn pay? Episodes to a fixed success, against credit for whole episodes.

    python benchmarks/turn_credit.py --out results/ [--envs guess] [--jobs 2]
    python benchmarks/turn_credit.py --out results/ --table

Environments: `decisions-8` and `decisions-24` (so many independent rewarded decisions an episode)
and `guess` (guess_number with rewards for narrowing the range). Every arm has the same model, the
same warm start, the same number of episodes a step, and the same grid of learning rates; each arm
is judged at its best rate. A run that never gets there, or that ends because no reward is left to
learn from, counts with all its episodes, marked `>`.

Each run is one process with one torch thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WINDOW = 3
"""Steps whose mean has to reach the target."""
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantile of Student's t by number of seeds."""


@dataclass(frozen=True)
class Setting:
    """An environment, and what counts as success in it."""

    overrides: tuple[str, ...]
    metric: str
    target: float
    prompts: int
    """Of a step; each is sampled eight times."""
    steps: int

    @property
    def episodes_per_step(self) -> int:
        return 8 * self.prompts


def decisions(num_turns: int, *, prompts: int, steps: int) -> Setting:
    """So many independent decisions an episode; nine in ten right is success."""
    return Setting(
        (
            f"env.id={HERE / 'decisions_env.py'}:Decisions",
            f"env.kwargs.num_turns={num_turns}",
            "env.process=false",
            f"rollout.max_turns={num_turns}",
            "rollout.max_turn_tokens=8",
            "model.warm_start.steps=200",
        ),
        metric="reward/mean",
        target=0.9 * num_turns,
        prompts=prompts,
        steps=steps,
    )


SETTINGS = {
    "decisions-8": decisions(8, prompts=8, steps=100),
    "decisions-24": decisions(24, prompts=4, steps=120),
    "guess": Setting(
        ("env.id=guess_number", "env.kwargs.turn_reward=1.0", "rollout.max_turn_tokens=8"),
        metric="success/mean",
        target=0.9,
        prompts=8,
        steps=80,
    ),
}
RATES = (3e-4, 6e-4, 1.2e-3)
ARMS = {
    "grpo": ["algo=grpo"],
    "turn_return": ["algo=turn_return"],
    "turn_return, gamma 0.5": ["algo=turn_return", "algo.gamma=0.5"],
}
COMMON = [
    "trainer.num_threads=1",
    "algo.entropy_coef=0.01",
    "trainer.eval_every=0",
    "eval.test_tasks=8",
    "trainer.trajectories=none",
    "trainer.save_every=0",
    "telemetry.trackers=[]",
    "actor.schedule=constant",
]


def run_one(env: str, arm: str, rate: float, seed: int, out: Path) -> None:
    """Run in this process."""
    from agentrl.cli.options import prepare_process
    from agentrl.config.load import load
    from agentrl.launch import open_trainer

    setting = SETTINGS[env]
    config = load(
        [
            *setting.overrides,
            *ARMS[arm],
            *COMMON,
            f"actor.lr={rate}",
            f"trainer.seed={seed}",
            f"trainer.prompts_per_step={setting.prompts}",
            "rollout.n=8",
            f"trainer.total_steps={setting.steps}",
            f"trainer.run_dir='{run_path(out, env, arm, rate, seed)}'",
        ]
    )
    prepare_process(1)

    async def main() -> None:
        async with open_trainer(config) as trainer:
            await trainer.fit()

    asyncio.run(main())


def run_path(out: Path, env: str, arm: str, rate: float, seed: int) -> Path:
    return out / f"{env}--{arm.replace(', ', '-').replace(' ', '-')}--{rate:g}--{seed}"


def episodes_to_target(run: Path, setting: Setting) -> tuple[float, bool]:
    """Episodes until the moving mean reaches the target, and whether it did."""
    values = [
        line[setting.metric]
        for line in map(json.loads, (run / "metrics.jsonl").open())
        if setting.metric in line
    ]
    for step in range(WINDOW, len(values) + 1):
        if statistics.fmean(values[step - WINDOW : step]) >= setting.target:
            return step * setting.episodes_per_step, True
    return setting.steps * setting.episodes_per_step, False


def table(out: Path, envs: Sequence[str], seeds: Sequence[int]) -> str:
    """Every arm at every rate, and the ratio of the best ones with its interval over seeds."""
    lines = []
    for env in envs:
        setting = SETTINGS[env]
        best: dict[str, list[float]] = {}
        lines += [
            f"\n{env}: episodes until {setting.metric} >= {setting.target}\n",
            "| arm | rate | " + " | ".join(f"seed {s}" for s in seeds) + " | geometric mean |",
            "|---|---|" + "---|" * (len(seeds) + 1),
        ]
        for arm in ARMS:
            by_rate: dict[float, list[float]] = {}
            for rate in RATES:
                found = [
                    episodes_to_target(run_path(out, env, arm, rate, s), setting) for s in seeds
                ]
                by_rate[rate] = [episodes for episodes, _ in found]
                cells = [f"{'' if ok else '>'}{episodes:,.0f}" for episodes, ok in found]
                mean = statistics.geometric_mean(by_rate[rate])
                lines.append(f"| {arm} | {rate:g} | {' | '.join(cells)} | {mean:,.0f} |")
            best[arm] = min(by_rate.values(), key=statistics.geometric_mean)
        lines.append("")
        for arm in list(ARMS)[1:]:
            lines.append(f"{arm}: {ratio_text(best['grpo'], best[arm])} fewer episodes than grpo")
    return "\n".join(lines)


def ratio_text(base: Sequence[float], other: Sequence[float]) -> str:
    """Ratio of geometric means with a 95 % interval of the paired log ratios."""
    logs = [math.log(b / o) for b, o in zip(base, other, strict=True)]
    centre = statistics.fmean(logs)
    half = T_QUANTILE[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(centre - half), math.exp(centre + half)
    return f"{math.exp(centre):.2f} times [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--envs", default=",".join(SETTINGS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", nargs=4, metavar=("ENV", "ARM", "RATE", "SEED"))
    given = parser.parse_args()
    out = given.out.resolve()
    if given.one:
        env, arm, rate, seed = given.one
        run_one(env, arm, float(rate), int(seed), out)
        return
    envs, seeds = given.envs.split(","), [int(seed) for seed in given.seeds.split(",")]
    if not given.table:
        runs = [
            (env, arm, rate, seed)
            for env in envs
            for rate in RATES
            for seed in seeds
            for arm in ARMS
        ]
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(lambda run: start(out, *run), runs))
    print(table(out, envs, seeds))


def start(out: Path, env: str, arm: str, rate: float, seed: int) -> Any:
    """Run one in a process of its own, unless it is there; its output goes to a file."""
    path = run_path(out, env, arm, rate, seed)
    if (path / "metrics.jsonl").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--out", str(out), "--one", env, arm, str(rate), str(seed)]
    with Path(f"{path}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False, timeout=3600)


if __name__ == "__main__":
    main()
