"""Compares gpuflow's worker processes with SPDL's on the same chunks.

    python experiments/worker_pool/run.py [--quick]

Prints each measurement and writes results.csv next to this file; `--quick` measures once and writes nothing. README.md
says what each arm and metric is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpuflow.tools.bench import row, write_results
from gpuflow.tools.samples import make_samples

HERE = Path(__file__).parent
DATA = Path("data/bench")
PHOTOGRAPHS = 2000
REPEATS, SECONDS = 5, 1.6
WORKLOAD = "random_resized_crop 224, flip, uint8; batch=64, chunk=32, 2 workers"
KILL_WORKLOAD = f"{WORKLOAD}; one of them killed in an epoch"
ARMS = (
    "gpuflow threads",
    "gpuflow processes",
    "spdl region, arrays",
    "spdl region, shared tensors",
    "spdl subprocesses, segment pool",
)
UNITS = {"images_per_s": "images/s", "cpu_s_per_1000": "s", "first_batch_s": "s"}
KILL_UNITS = {"batches_after_kill": "share", "hangs_after_kill": "hangs", "errors_after_kill": "errors"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repeat, to see that it runs; writes nothing")
    quick = parser.parse_args().quick
    print(make_samples(DATA, PHOTOGRAPHS))
    rows = [*throughput(1 if quick else REPEATS), *kills()]
    if not quick:
        write_results(HERE / "results.csv", rows)
        print("wrote", HERE / "results.csv")


def throughput(repeats: int) -> list[dict[str, Any]]:
    """Every arm `repeats` times, in turns, alone on the machine."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        for arm in ARMS if repeat % 2 == 0 else reversed(ARMS):
            found[arm].append(measure(arm, kill=False))
            print(f"{arm:32}", *(f"{found[arm][-1][metric]:8.4g} {unit}" for metric, unit in UNITS.items()), flush=True)
    return [row(arm, WORKLOAD, metric, values(found[arm], metric), UNITS[metric]) for arm in ARMS for metric in UNITS]


def kills() -> list[dict[str, Any]]:
    """Every arm that has processes, all at the same time: nothing here depends on the speed."""
    arms = ARMS[1:]
    with ThreadPoolExecutor(len(arms)) as pool:
        found = dict(zip(arms, pool.map(lambda arm: measure(arm, kill=True), arms), strict=True))
    for arm in arms:
        print(f"{arm:32} {found[arm]['outcome']}", flush=True)
    return [
        row(arm, KILL_WORKLOAD, metric, values([found[arm]], metric), unit)
        for arm in arms
        for metric, unit in KILL_UNITS.items()
    ]


def measure(arm: str, *, kill: bool) -> dict[str, Any]:
    """One measurement, in a fresh process."""
    job = json.dumps({"arm": arm, "kill": kill, "seconds": SECONDS})
    done = subprocess.run(
        [sys.executable, str(HERE / "arms.py"), job], check=False, timeout=300, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{arm} failed:\n{done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def values(results: Sequence[dict[str, Any]], metric: str) -> list[float]:
    return [result[metric] for result in results]


if __name__ == "__main__":
    main()
