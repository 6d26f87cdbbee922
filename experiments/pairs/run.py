"""Compares the speed of two checkouts of gpuflow in interleaved pairs.

    git worktree add ../before COMMIT
    gpuflow samples data/bench -n 2000
    python experiments/pairs/run.py ../before data/bench             # on the CPU
    python experiments/pairs/run.py ../before /dev/shm/photos --gpu  # on an NVIDIA GPU

Each measurement is a new process that imports one of the checkouts; the order within a pair alternates. A loader runs
one epoch unmeasured, then is measured for some seconds. Writes its rows to results.csv in this file's folder; `ratio`
is the median over the pairs of new / old.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CPU = {"threads": "run.processes=0", "processes": "run.processes={threads}"}
GPU = ("alone", "resnet18")
SECONDS, LIMIT_SECONDS = 5.0, 180


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU, and processes; default: %(default)s")
    parser.add_argument("--workloads", nargs="+", choices=[*CPU, *GPU], help="default: all of the device")
    parser.add_argument("--pairs", type=int, choices=range(1, 100), default=5, metavar="N")
    options = parser.parse_args()
    from gpuflow.tools.bench import row, write_results

    workloads = options.workloads or list(GPU if options.gpu else CPU)
    device = "gpu" if options.gpu else f"cpu {options.threads}"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in workloads}
    for number in range(options.pairs):
        for name in workloads:
            trees = {"old": options.old.resolve(), "new": ROOT}
            order = ["old", "new"] if number % 2 == 0 else ["new", "old"]
            rates = {arm: measured(trees[arm], options.folder.resolve(), name, options) for arm in order}
            found[name].append((rates["old"], rates["new"]))
            print(f"{name:12} old {rates['old']:8.0f}  new {rates['new']:8.0f}  {rates['new'] / rates['old']:.3f}")
    rows: list[dict[str, Any]] = []
    for name, pairs in found.items():
        workload = f"{device} {name}"
        for arm, values in zip(("old", "new"), zip(*pairs, strict=True), strict=True):
            rows.append(row(arm, workload, "images_per_s", values, "images/s"))
        rows.append(row("new / old", workload, "ratio", [new / old for old, new in pairs], "ratio"))
        print(f"{name}: median ratio {statistics.median(new / old for old, new in pairs):.3f}")
    write_results(HERE / "results.csv", [*rows_of_others({row["workload"] for row in rows}), *rows])


def rows_of_others(workloads: set[str]) -> list[dict[str, Any]]:
    """The rows of results.csv that this run does not replace."""
    path = HERE / "results.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["workload"] not in workloads]


def measured(tree: Path, folder: Path, name: str, options: argparse.Namespace) -> float:
    """Images a second of one checkout, in a separate process."""
    threads = 0 if options.gpu else options.threads
    command = [sys.executable, __file__, "measure", str(tree), str(folder), name, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{tree}: {done.stderr.strip()[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(tree: str, folder: str, name: str, threads: int) -> float:
    """Return the images a second of one checkout; on a GPU if `threads` is 0."""
    gpu = not threads
    sys.path.insert(0, tree)
    import torch

    import gpuflow

    assert str(gpuflow.__file__).startswith(tree), gpuflow.__file__
    overrides = [f"source.folder={folder}"]
    if not gpu:
        overrides += [f"run.threads={threads}", CPU[name].format(threads=threads)]
    config = HERE.parent / ("gpu_path" if gpu else "pairs") / "photos.yaml"
    loader = gpuflow.load(config, device="cuda" if gpu else None, overrides=overrides)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    iterator = batches()
    step: Callable[[], object] = functools.partial(next, iterator)
    if name == "resnet18":
        step = training_step(iterator)
    for _ in range(len(loader)):
        next(iterator)
    while loader.stats().get("processes", {}).get("starting"):
        next(iterator)
    for _ in range(8):
        step()
    finish: Callable[[], None] = torch.cuda.synchronize if gpu else _nothing
    finish()
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        step()
        images += loader.batch_size
    finish()
    return images / (time.perf_counter() - start)


def _nothing() -> None:
    """The CPU has finished when a step returns."""


def training_step(iterator: Iterator[Any]) -> Callable[[], object]:
    """A step of ResNet-18 in bfloat16 and channels_last on the GPU."""
    import torch
    import torchvision

    model = torchvision.models.resnet18().cuda().to(memory_format=torch.channels_last).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        images, labels = next(iterator)
        optimizer.zero_grad(set_to_none=True)
        loss(model(images), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        tree, folder, name, threads = sys.argv[2:]
        print(json.dumps(measure(tree, folder, name, int(threads))))
    else:
        main()
