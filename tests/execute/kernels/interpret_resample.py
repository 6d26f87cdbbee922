"""Run by test_resample.py with TRITON_INTERPRET=1, in its own process: compares the kernel with its reference.

Prints one line a case: its name and the largest difference in levels.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from gpuflow.execute.gpu.device_passes import plan_of
from gpuflow.execute.kernels.resample import resample_all
from gpuflow.pipeline.program import ResamplingStep
from gpuflow.pipeline.stage import Geometry, Keys
from gpuflow.stages import CenterCrop, Flip, Letterbox, Pad, RandomCrop, RandomResizedCrop, Resize
from tests.execute.kernels import quick_interpreter  # noqa: F401  # replaces parts of Triton's interpreter
from tests.execute.kernels.references import sample_reference
from tests.execute.kernels.turned import in_memory

SIZES = ((48, 37), (1, 1), (17, 48), (5, 3))


def pipelines() -> list[tuple[str, tuple[Geometry, ...]]]:
    """Runs of geometry stages for every interpolation: shrinking, growing, crops before and after, flips, padding."""
    found: list[tuple[str, tuple[Geometry, ...]]] = []
    for kind, antialias in itertools.product(("nearest", "bilinear", "bicubic"), (True, False)):
        name = f"{kind} antialias={antialias}"
        shared: dict[str, Any] = {"interpolation": kind, "antialias": antialias}
        flip = Flip(horizontal=0.5, vertical=0.5)
        found.append((f"crop {name}", (RandomResizedCrop(size=(13, 9), **shared), flip)))
        found.append((f"grow {name}", (flip, Resize(height=40, width=31, **shared))))
        found.append((f"window {name}", (Resize(shorter=12, **shared), CenterCrop(size=12), flip)))
        fill = (9, 200, 50)
        found.append((f"letterbox {name}", (flip, Letterbox(size=(20, 14), fill=fill, **shared), flip)))
        found.append(
            (f"fill {name}", (Resize(height=8, width=9, **shared), Pad(padding=(1, 0, 2, 3), fill=fill), flip))
        )
        found.append((f"pad {name}", (Resize(height=8, width=9, **shared), RandomCrop(size=11, padding=3), flip)))
    return found


def difference(stages: tuple[Geometry, ...], channels: int, layout: str, dtype: torch.dtype) -> float:
    rng = np.random.default_rng(0)
    images = [torch.from_numpy(rng.integers(0, 256, (*size, channels), dtype=np.uint8)) for size in SIZES]
    heights, widths = np.array(SIZES).T
    step = ResamplingStep(stages, (0,) * len(stages), 10**6)
    resampling = step.draw(Keys(0, 0, np.arange(len(SIZES))), heights, widths)
    rows = np.arange(len(SIZES))[::-1].copy()
    _held, places = in_memory([image.numpy() for image in images])
    plan = torch.from_numpy(plan_of(resampling, places, rows))
    table = torch.stack([torch.arange(256.0) + 256 * c for c in range(channels)]).to(dtype)
    height, width = resampling.window[0, 2:].tolist()
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    out = torch.full((len(SIZES), channels, height, width), -1.0).to(dtype).contiguous(memory_format=memory)
    plan[:, -1] *= out.stride(0)
    how: dict[str, Any] = {
        "interpolation": resampling.interpolation,
        "antialias": resampling.antialias,
        "fill": resampling.fill,
    }
    resample_all(plan, table, out, **how)
    expected = sample_reference(images, plan, table, **how)
    return float((out[rows.tolist()].float() - expected.float()).abs().max())


if __name__ == "__main__":
    for name, stages in pipelines():
        print(f"{name}, 3 channels nchw float32: {difference(stages, 3, 'nchw', torch.float32)}", flush=True)
    stages = pipelines()[6][1]
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
    for channels, layout, dtype in itertools.product((1, 3), ("nchw", "nhwc"), dtypes):
        if dtype == torch.float32 or channels == 1:
            print(f"{channels} {layout} {dtype}: {difference(stages, channels, layout, dtype)}", flush=True)
