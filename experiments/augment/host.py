"""Measures the processor's work for a batch that `gpuflow.transform` augments on a GPU. Needs no GPU.

    python experiments/augment/host.py --out experiments/augment/host.csv

Triton compiles the kernels for an H100 but launches nothing, and tensors are in the host's memory. So a figure has
drawing, describing and packing, torch's allocations and Triton's part of each launch, but nothing of CUDA's driver.
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
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gpuflow.config import read_config
from gpuflow.execute.gpu_passes import DevicePasses, interleaved
from gpuflow.execute.passes import passes_of
from gpuflow.pipeline.stage import Keys
from gpuflow.stages import STAGES
from gpuflow.tools.bench import row, write_results

WARM_UP_CALLS = 3


class NoDriver:
    """Replaces Triton's driver for NVIDIA GPUs. Kernels are compiled for an H100; a launch does nothing."""

    class utils:
        @staticmethod
        def load_binary(*kernel: Any) -> tuple[int, int, int, int, int]:
            """Module, function, registers, spilled registers, most threads."""
            return 1, 2, 32, 0, 1024

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}

    class launcher_cls:
        def __init__(self, source: Any, metadata: Any) -> None: ...

        def __call__(self, *arguments: Any) -> None: ...

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def measure(recipe: str, count: int, calls: int) -> list[float]:
    """The seconds of each call on `count` images."""
    program: Any = read_config(CONFIG, STAGES).programs[recipe]
    passes, stream = passes_of(program), CpuStream()
    assert not isinstance(passes, str), passes
    runner: Any = DevicePasses(passes, stream)
    images = torch.zeros((count, HEIGHT, WIDTH, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    slots = torch.empty((count, 3, 224, 224))
    seconds = []
    for epoch in range(calls + WARM_UP_CALLS):
        start = time.perf_counter()
        runner.run_images(interleaved(images, stream), Keys(0, epoch, np.arange(count)), slots)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP_CALLS:]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--out", type=Path, default=HERE / "host.csv")
    options = parser.parse_args(arguments)
    driver.set_active(NoDriver())
    rows = []
    for recipe in options.recipes:
        milliseconds = [1e3 * x for x in measure(recipe, options.batch, options.calls)]
        print(f"{recipe:9} {np.median(milliseconds):6.2f} ms, lowest {min(milliseconds):.2f}", flush=True)
        rows.append(row("gpuflow", f"{recipe} 224; batch={options.batch}", "host_ms", milliseconds, "ms"))
    write_results(options.out, rows)


if __name__ == "__main__":
    main()
