"""Measures the intervals between training steps on the GPU, with several variants of the loader.

    python experiments/gpu_path/intervals.py /dev/shm/photos [VARIANT ...]

Runs the variants in turn. Prints for each the ratio to a resident batch; the median, 99th percentile and maximum of the
intervals in ms; the fraction of the time in intervals more than a tenth above the median; the time that the loop waited
for a batch and the time to launch a step (median, maximum). A window of 2.5 s begins with an idle GPU. The medians show
how much the loader slows the GPU; the excess above them shows how much threads delay each other.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from run import BATCH, DTYPES, HERE, Batches, Training

import gpuflow

SECONDS, TURNS = 2.5, 2

VARIANTS: dict[str, Sequence[tuple[str, Any]]] = {
    "full": (),
    "without resampling": (("gpuflow.execute.gpu.device_passes.resample_all", lambda *arguments, **options: None),),
    "without decoding": (("gpuflow.decode.nvjpeg.BatchedDecoder.decode_by", lambda *arguments: time.sleep(0.004)),),
    "five batches": (("gpuflow.loader.lowering._BATCHES_AT_EASE", 5),),
    "hurried": (("gpuflow.loader.lowering._BATCHES_AT_EASE", 5), ("gpuflow.loader.epoch._LATE_BATCHES", 0)),
    "threads read": (("gpuflow.loader.assemble.readers_of", lambda *arguments, **options: 0),),
}
"""For each variant the functions that are replaced. Without decoding, a call takes as long as on an idle GPU."""

Step = tuple[torch.cuda.Event, float, float]
"""An event after the step, seconds until its batch was ready, seconds until it was launched."""


def timed(training: Training, batches: Batches | None) -> Step:
    start, waited = time.perf_counter(), 0.0

    def watched() -> Iterator[torch.Tensor]:
        nonlocal waited
        assert batches is not None
        images = next(batches)
        waited = time.perf_counter() - start
        yield images

    training.step(watched() if batches is not None else None)
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(training.stream)
    return event, waited, time.perf_counter() - start - waited


def window(step: Callable[[], Step]) -> tuple[float, list[Step]]:
    """Run one window: (images per second, the steps)."""
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    steps, start = [], time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        steps.append(step())
    torch.cuda.synchronize()
    return len(steps) * BATCH / (time.perf_counter() - start), steps


def show(name: str, found: tuple[float, list[Step]], base: float) -> None:
    rate, steps = found
    ms = np.array([a[0].elapsed_time(b[0]) for a, b in itertools.pairwise(steps)])
    median = np.median(ms)
    excess = (ms[ms > 1.1 * median] - median).sum() / ms.sum()
    waited, launched = (np.array([step[i] for step in steps]) * 1000 for i in (1, 2))
    print(
        f"{name:18} ratio {rate / base:.4f}  interval {median:.2f} {np.quantile(ms, 0.99):.2f} {ms.max():.1f}  "
        f"excess {excess:.4f}  waited {np.median(waited):.2f} {waited.max():.1f}  "
        f"launched {np.median(launched):.2f} {launched.max():.1f}",
        flush=True,
    )


def main() -> None:
    folder, *names = sys.argv[1:]
    torch.backends.cudnn.benchmark = True
    training = Training("resnet18", DTYPES["gpuflow"])
    resident = functools.partial(timed, training, None)
    window(resident)
    base = (found := window(resident))[0]
    show("resident", found, base)
    for _ in range(TURNS):
        for name in names or VARIANTS:
            gc.collect()
            torch.cuda.empty_cache()
            with ExitStack() as patches:
                for place, stand_in in VARIANTS[name]:
                    patches.enter_context(patch(place, stand_in))
                loader = gpuflow.load(HERE / "photos.yaml", device="cuda", overrides=[f"source.folder={folder}"])
                batches = (images for _ in itertools.count() for images, _ in loader)
                for _ in range(2):
                    show(name, window(functools.partial(timed, training, batches)), base)
                batches.close()
                loader.close()
    show("resident", window(resident), base)
    os._exit(0)


if __name__ == "__main__":
    main()
