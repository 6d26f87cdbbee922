"""Where the time of a training's steps goes: on the GPU, or waiting for batches, with few and many hardware queues.

    python experiments/ranks/steps.py /dev/shm/photos [--queues 8 32] [--repeats 3] [--model resnet18]

Each number of hardware queues is measured in its own process, on one GPU. There the step is launched kernel by kernel
or as one CUDA graph, which leaves the processor almost nothing to do, with DistributedDataParallel (DDP) and without.
See NOTES.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from one_rank import ARMS, STEPS_AHEAD, WARM_UP_STEPS, GraphTraining, only_rank
from torch.multiprocessing.spawn import spawn

from gpuflow.runtime.cuda import QUEUES_VARIABLE


class Steps(NamedTuple):
    """images_per_s; and in ms of each step: working, how long the GPU worked on it, waiting, how long it waited for the
    batch before that, getting, how long the loop waited for the batch."""

    images_per_s: float
    working: list[float]
    waiting: list[float]
    getting: list[float]

    def __str__(self) -> str:
        parts = [f"{self.images_per_s:7,.0f} images/s"]
        for name, times in (("GPU works", self.working), ("GPU waits", self.waiting), ("loop waits", self.getting)):
            middle, most = np.percentile(times, [50, 95])
            parts.append(f"{name} {np.mean(times):.1f} (p50 {middle:.1f}, p95 {most:.1f})")
        return "; ".join(parts) + " ms"


def event() -> torch.cuda.Event:
    found = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    found.record()
    return found


def measured(training: Any, batches: Iterator[torch.Tensor], steps: int, batch: int) -> Steps:
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]] = []
    getting, start = list[float](), 0.0
    for number in range(-WARM_UP_STEPS, steps):
        if number == 0:
            torch.cuda.synchronize()
            marks, getting, start = [], [], time.perf_counter()
        asked, before = event(), time.perf_counter()
        images = next(batches)
        getting.append((time.perf_counter() - before) * 1000)
        begun = event()
        training.step(images)
        del images
        marks.append((asked, begun, event()))
        if len(marks) > STEPS_AHEAD:
            marks[-1 - STEPS_AHEAD][2].synchronize()
    torch.cuda.synchronize()
    rate = steps * batch / (time.perf_counter() - start)
    working = [begun.elapsed_time(ended) for _, begun, ended in marks]
    return Steps(rate, working, [asked.elapsed_time(begun) for asked, begun, _ in marks], getting)


def measure(_number: int, options: argparse.Namespace) -> None:
    """One process; prints a line for each measurement."""
    device = torch.device("cuda", 0)
    with ExitStack() as stack:
        rank = only_rank(options, device, ["gpuflow", "gpuflow without DDP"], stack)
        trainings: dict[tuple[str, bool], Any] = {("launched", ddp): rank.trainings[ddp] for ddp in (False, True)}
        for ddp in (False, True):
            trainings["a graph", ddp] = GraphTraining(options.model, device, options.batch, ddp=ddp)
        loaded = rank.batches_of(ARMS["gpuflow"])
        for repeat in range(options.repeats):
            for (kind, ddp), training in trainings.items():
                title = f"{os.environ[QUEUES_VARIABLE]:>2} queues, {kind:8}{', DDP' if ddp else ''}"
                if repeat == 0:
                    print(f"{title}, resident: {measured(training, rank.resident, options.steps, options.batch)}")
                print(f"{title}: {measured(training, loaded, options.steps, options.batch)}", flush=True)
    os._exit(0)  # without waiting for threads of NCCL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="photographs, in a folder for each class")
    parser.add_argument("--queues", type=int, nargs="+", default=[8, 32], help="hardware queues (default: 8 32)")
    parser.add_argument("--model", default="resnet18", help="of torchvision")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of a measurement")
    parser.add_argument("--warm-up", type=int, default=256, help="batches that are loaded first")
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    for queues in options.queues:
        os.environ[QUEUES_VARIABLE] = str(queues)
        spawn(measure, (options,), nprocs=1)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
