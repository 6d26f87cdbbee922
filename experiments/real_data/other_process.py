"""What a training would keep of its speed if the loader did not need its interpreter: the loader in another process.

    python experiments/real_data/other_process.py FOLDER --model compiled_resnet18

The other process loads a batch for each step of the training, which trains on a resident batch and waits until the
loader's GPU work for a batch is done. No pixels are passed on. Prints the training's time for a step, paced by the
other process, and fed by a loader in its own process. Two processes take turns on a GPU, unless NVIDIA's Multi-Process
Service runs (`nvidia-cuda-mps-control -d`, before this script).
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path
from typing import Any

import arms
import torch

AHEAD, SECONDS_TO_START = 3, 120.0
"""Batches that may be loaded before they are needed; and how long the other process may take for one."""
RESIDENT_SECONDS = 1.0


def load(job: dict[str, Any], wanted: Semaphore, loaded: Semaphore, warm: Event, stop: Event) -> None:
    """The other process: loads a batch each time that one is wanted."""
    loader = arms.Gpuflow(job)
    while not stop.is_set():
        if wanted.acquire(timeout=1.0):
            loader.next()
            if job["device"] == "cuda":
                torch.cuda.current_stream().synchronize()
            loaded.release()
            if loader.is_warm():
                warm.set()
    loader.close()


def report(meter: arms.Meter, training: arms.Training, step: Callable[[], object], name: str, repeats: int) -> None:
    """Print the time for a step, and its ratio to that on a resident batch just before, several times."""
    for _ in range(repeats):
        resident = arms.Meter(str(meter.device), meter.batch, RESIDENT_SECONDS).rate(training.resident_step)
        rate = meter.rate(step)["images_per_s"]
        ratio = rate / resident["images_per_s"]
        print(
            f"{name}: {meter.batch / rate * 1e3:.2f} ms a step, {ratio:.3f} of the speed on a resident batch",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="photographs, in a folder for each class")
    parser.add_argument("--model", default="compiled_resnet18", help="see `Training` of arms.py (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that this runs")
    options = parser.parse_args(arguments)
    job = {"folder": str(options.folder.resolve()), "batch": options.batch, "device": options.device, "set": []}
    meter = arms.Meter(options.device, options.batch, options.seconds)
    training = arms.Training(options.model, meter, arms.Gpuflow.dtype)
    meter.warm(training.resident_step, RESIDENT_SECONDS)

    context = multiprocessing.get_context("spawn")
    wanted, loaded, warm, stop = context.Semaphore(AHEAD), context.Semaphore(0), context.Event(), context.Event()
    other = context.Process(target=load, args=(job, wanted, loaded, warm, stop))
    other.start()

    def paced_step() -> None:
        if not loaded.acquire(timeout=SECONDS_TO_START):
            raise TimeoutError(f"the other process loaded no batch within {SECONDS_TO_START:g} s")
        training.resident_step()
        wanted.release()

    try:
        while not warm.is_set():
            paced_step()
        report(meter, training, paced_step, "paced by another process", options.repeats)
    finally:
        stop.set()
        other.join(20)
        other.kill()

    loader = arms.Gpuflow(job)
    loader.next()
    while not loader.is_warm():
        loader.next()
    report(meter, training, lambda: training.fed_step(loader), "fed by this process", options.repeats)
    loader.close()


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s in all")
