"""Does the first run learn, and does what it learns come from the tool? Arms with controls.

    python benchmarks/first_run.py --out results/ [--arms learn,lr0,...] [--seeds 0,1,2] [--jobs 2]
    python benchmarks/first_run.py --out results/ --table

Each (arm, seed) is one process of `agentrl train --env code_sandbox` with the default recipe, one
torch thread, one core. Arms:

* learn: the default recipe.
* lr0: a learning rate of 0. Nothing may change, to the last bit.
* mute: the tool answers nothing. Nothing may be gained.
* shuffled: rewards are permuted among the trajectories of a step before advantages are computed.
* double: the warm start takes twice the steps; nothing is trained after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARMS: dict[str, list[str]] = {
    "learn": [],
    "lr0": ["actor.lr=0", "trainer.total_steps=4"],
    "mute": [f"tools.specs.python={HERE / 'mute_tool' / 'tool.yaml'}"],
    "shuffled": [],
    "double": ["model.warm_start.steps=1600", "actor.lr=0", "trainer.total_steps=1"],
}
COMMON = ["trainer.num_threads=1", "telemetry.trackers=[]", "trainer.trajectories=none"]


def run_one(arm: str, seed: int, out: Path) -> None:
    """Run in this process; the seed decides the warm start and the training."""
    from agentrl.cli.options import prepare_process
    from agentrl.config.load import load
    from agentrl.launch import open_trainer

    run = out / f"{arm}-{seed}"
    config = load(
        ["env.id=code_sandbox", f"trainer.seed={seed}", f"model.warm_start.seed={seed}"]
        + [f"trainer.run_dir='{run}'", *COMMON, *ARMS[arm]]
    )
    prepare_process(1)

    async def main() -> None:
        start = time.perf_counter()
        async with open_trainer(config) as trainer:
            if arm == "shuffled":
                trainer.assemble = shuffled(trainer.assemble, seed)
            await trainer.fit()
        usage = os.times()
        facts = {
            "wall_s": time.perf_counter() - start,
            "cpu_s": usage.user + usage.system + usage.children_user + usage.children_system,
        }
        (run / "cost.json").write_text(json.dumps(facts))

    asyncio.run(main())


def shuffled(assemble: Any, seed: int) -> Any:
    """Permute the scores among all trajectories of a step, then assemble as ever."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def permuted(groups: Sequence[Any]) -> Any:
        members = [t for group in groups for t in group.trajectories if not t.failed]
        scores = [members[i].score for i in rng.permutation(len(members))]
        other = dict(zip((id(t) for t in members), scores, strict=True))
        return assemble(
            [
                replace(
                    group,
                    trajectories=[
                        replace(t, score=other.get(id(t), t.score)) for t in group.trajectories
                    ],
                )
                for group in groups
            ]
        )

    return permuted


def result_of(run: Path) -> dict[str, Any]:
    """Read what a run came to."""
    from agentrl.telemetry.trajectory_io import read_trajectories

    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    first, last = lines[0], lines[-1]
    prefix = "test/code_sandbox/success"
    final = [
        t
        for t in read_trajectories(run / "eval" / f"step_{last['step']:06d}.jsonl")
        if t.group_id.startswith("eval-test") and t.score is not None and t.score.success
    ]
    passed = [t for t in final if last_answer(t) == "2/2 pass"]
    cost = json.loads((run / "cost.json").read_text())  # written when a run is complete
    return {
        "start": first[prefix],
        "end": last[prefix],
        "start_unseen": first[f"{prefix}/pairs=unseen"],
        "end_unseen": last[f"{prefix}/pairs=unseen"],
        "by_readings": {n: last[f"{prefix}/readings={n}"] for n in (2, 3)},
        "ends_on_a_pass": len(passed) / max(len(final), 1),
        "steps": last["step"],
        "val": [
            (line["step"], line["val/code_sandbox/success"])
            for line in lines
            if "val/code_sandbox/success" in line
        ],
        "train": [(line["step"], line["success/mean"]) for line in lines[1:]],
        **cost,
    }


def last_answer(trajectory: Any) -> str:
    """What the tool said last."""
    results = [result for turn in trajectory.turns for result in turn.tool_results]
    return results[-1].content.strip() if results else ""


def run_all(arms: Sequence[str], seeds: Sequence[int], out: Path, jobs: int) -> None:
    """Run every arm and seed in processes of their own, ``jobs`` at a time."""
    out.mkdir(parents=True, exist_ok=True)
    # Arms of one seed share its warm start: the arm that makes it goes first.
    wanted = [(arm, seed) for arm in arms for seed in seeds]

    def one(item: tuple[str, int]) -> None:
        arm, seed = item
        log = (out / f"{arm}-{seed}.log").open("w")
        command = [sys.executable, __file__, "--out", str(out), "--one", f"{arm}:{seed}"]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        print(
            f"{arm} seed {seed}: {'done' if code == 0 else f'failed, see {log.name}'}", flush=True
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, wanted))


def table(out: Path, as_json: bool) -> None:
    """Print what is there."""
    results = {path.parent.name: result_of(path.parent) for path in sorted(out.glob("*/cost.json"))}
    if as_json:
        print(json.dumps(results, indent=1))
        return
    head = ("run", "start", "end", "gain", "unseen", "unseen gain", "pass last", "CPU s", "wall s")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, r in results.items():
        unseen = r["end_unseen"] - r["start_unseen"]
        print(
            f"| {name} | {r['start']:.3f} | {r['end']:.3f} | {r['end'] - r['start']:+.3f} "
            f"| {r['start_unseen']:.3f} -> {r['end_unseen']:.3f} | {unseen:+.3f} "
            f"| {r['ends_on_a_pass']:.3f} | {r.get('cpu_s', 0):.0f} | {r.get('wall_s', 0):.0f} |"
        )


def plot(out: Path, picture: Path) -> None:
    """Draw success during training, one line per run, and the held-out results at its ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"learn": "#2563a8", "mute": "#b0572f", "shuffled": "#7a7a7a", "lr0": "#3d8b5f"}
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for path in sorted(out.glob("*/cost.json")):
        arm = path.parent.name.split("-")[0]
        if arm not in colors:
            continue
        result = result_of(path.parent)
        steps, values = zip(*result["train"], strict=True)
        axes.plot(steps, values, color=colors[arm], alpha=0.45, linewidth=1)
        ends = ([0, result["steps"]], [result["start"], result["end"]])
        label = arm if path.parent.name.endswith("-0") else None
        axes.plot(*ends, "o", color=colors[arm], markersize=5, label=label)
    axes.set(xlabel="training step", ylabel="success", title="code_sandbox, level 1")
    axes.set(xticks=range(0, 21, 5), ylim=(0, 1))
    axes.grid(alpha=0.25)
    legend = "lines: episodes trained on\npoints: 1,024 held-out tasks"
    axes.legend(title=legend, loc="center right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", help="ARM:SEED, in this process")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="Write a picture of what is there.")
    given = parser.parse_args()
    if given.one:
        arm, seed = given.one.split(":")
        run_one(arm, int(seed), given.out)
        return
    if given.plot:
        plot(given.out, given.plot)
        return
    if not given.table:
        seeds = [int(seed) for seed in given.seeds.split(",")]
        run_all(given.arms.split(","), seeds, given.out, given.jobs)
    table(given.out, given.json)


if __name__ == "__main__":
    main()
