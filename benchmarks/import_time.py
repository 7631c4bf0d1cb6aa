"""What a cold start costs: `import agentrl` and `agentrl --help`, beside a bare interpreter.

python benchmarks/import_time.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

RUNS = 15
ARMS = {
    "bare interpreter (floor)": [sys.executable, "-c", "pass"],
    "import agentrl": [sys.executable, "-c", "import agentrl"],
    "import numpy": [sys.executable, "-c", "import numpy"],
    "agentrl --help": [sys.executable, "-m", "agentrl.cli.main", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
}
TARGET_S = {"import agentrl": 0.3, "agentrl --help": 0.6}


def seconds(command: list[str], runs: int) -> list[float]:
    subprocess.run(command, check=True, capture_output=True)  # fills the page cache
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name, command in ARMS.items():
        times = seconds(command, 5 if "torch" in name else RUNS)
        results[name] = {"median_s": statistics.median(times), "max_s": max(times)}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'arm':28}{'median':>10}{'max':>10}{'target':>10}")
    for name, result in results.items():
        target = f"{TARGET_S[name]:.1f} s" if name in TARGET_S else ""
        print(f"{name:28}{result['median_s']:8.3f} s{result['max_s']:8.3f} s{target:>10}")


if __name__ == "__main__":
    main()
