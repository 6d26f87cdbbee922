"""Runs each pair of scripts of this folder, before and after the move to gpuflow, and prints what came out.

    python experiments/migrate/run.py

Takes a few minutes on two CPU cores, each script less than one; nothing is downloaded. Writes results.csv in this
file's folder, or where `--results` says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuflow.tools.bench import row, write_results
from gpuflow.tools.samples import make_samples

__all__ = ["PAIRS", "run"]

HERE = Path(__file__).parent
PAIRS = ("one_gpu", "dp", "ddp", "validation", "one_graph", "two_parts")
"""Each is a script NAME_before.py and one NAME_after.py. Those that test a model take validation_after.py's."""
LIMIT_SECONDS = 600


def run(script: Path, folder: Path) -> list[dict[str, float]]:
    """What a script reports of each of its passes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(torchrun if script.name.startswith("ddp") else []), str(script), str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{script.name}: {done.stderr.strip()[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print(f"{'pair':12}{'arm':8}{'loss':>8}{'accuracy':>10}{'images/s':>10}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_samples(folder / "train", options.photos)
        make_samples(folder / "val", options.photos // 5, seed=1)
        for pair in options.pairs:
            for arm in ("before", "after"):
                passes = run(HERE / f"{pair}_{arm}.py", folder)
                last, rates = passes[-1], [one["images"] / one["seconds"] for one in passes]
                rate = statistics.median(rates)
                print(f"{pair:12}{arm:8}{last['loss']:8.3f}{last['accuracy']:10.3f}{rate:10.0f}", flush=True)
                workload = f"{pair}, {options.photos} photographs"
                rows.append(row(arm, workload, "loss", [last["loss"]], "nats"))
                rows.append(row(arm, workload, "accuracy", [last["accuracy"]], "share"))
                rows.append(row(arm, workload, "images_per_s", rates, "images/s"))
    write_results(options.results, rows)


if __name__ == "__main__":
    main()
