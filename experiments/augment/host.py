"""Measures the processor's work for a batch that `gpuflow.transform` augments on a GPU. Needs no GPU.

    python experiments/augment/host.py --out experiments/augment/host.csv

Tensors are in the host's memory, and no kernel is launched: what replays the kernels of a batch as a CUDA graph does
nothing here. So a figure has drawing, describing and packing and torch's allocations, but nothing of CUDA's driver.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import CpuStream
from run import CONFIG, HEIGHT, HERE, RECIPES, WIDTH

from gpuflow.config import read_config
from gpuflow.execute.gpu import device_passes
from gpuflow.execute.gpu.device_passes import interleaved
from gpuflow.execute.gpu.passes import passes_of
from gpuflow.execute.gpu.repeated_passes import RepeatedPasses
from gpuflow.pipeline.stage import Keys
from gpuflow.stages import STAGES
from gpuflow.tools.bench import row, write_results

WARM_UP_CALLS = 18
CALLS = 16
"""Calls of a measurement. Passes draw for this number of batches at once, so all measurements have the same work."""


class HostStream(CpuStream):  # type: ignore[misc]
    """With the transfers of a batch, as copies in the host's memory."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def send(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def copy_into(self, target: torch.Tensor, host: torch.Tensor) -> None:
        target.copy_(host)


def measure(recipe: str, count: int, measurements: int) -> list[float]:
    """The seconds of a call on a list of `count` images: means of CALLS calls."""
    program: Any = read_config(CONFIG, STAGES).programs[recipe]
    passes, stream = passes_of(program), HostStream()
    assert not isinstance(passes, str), passes
    runner: Any = RepeatedPasses(passes, stream, lambda launch: lambda: None)
    images = list(torch.zeros((count, HEIGHT, WIDTH, 3), dtype=torch.uint8).permute(0, 3, 1, 2))
    slots = torch.empty((count, 3, 224, 224))
    seconds = []
    for step in range(WARM_UP_CALLS + CALLS * measurements):
        start = time.perf_counter()
        runner.run_images(interleaved(images, stream), Keys(0, 0, np.arange(count) + count * step), slots)
        seconds.append(time.perf_counter() - start)
    means: list[float] = np.array(seconds[WARM_UP_CALLS:]).reshape(measurements, CALLS).mean(axis=1).tolist()
    return means


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--measurements", type=int, default=30)
    parser.add_argument("--out", type=Path, default=HERE / "host.csv")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for kernel in ("resample_all", "warp_all", "adjust", "smooth"):  # which the first calls launch one by one
        setattr(device_passes, kernel, lambda *_, **__: None)
    rows = []
    for recipe in options.recipes:
        milliseconds = [1e3 * x for x in measure(recipe, options.batch, options.measurements)]
        print(f"{recipe:9} {np.median(milliseconds):6.2f} ms, lowest {min(milliseconds):.2f}", flush=True)
        rows.append(row("gpuflow", f"{recipe} 224; batch={options.batch}", "host_ms", milliseconds, "ms"))
    write_results(options.out, rows)


if __name__ == "__main__":
    main()
