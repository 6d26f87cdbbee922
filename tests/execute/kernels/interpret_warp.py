"""Run by test_warp.py with TRITON_INTERPRET=1, in its own process: compares the kernel with the CPU's form.

Prints one line a case: its name and the largest difference in levels.
"""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from gpuflow.execute.gpu.device_passes import plan_of
from gpuflow.execute.gpu.results import Canvas, tiles_of
from gpuflow.execute.kernels.warp import warp_all, warp_plan_of
from gpuflow.pipeline.parameters import Border
from gpuflow.pipeline.program import WarpStep
from gpuflow.pipeline.stage import Geometry, Keys
from gpuflow.stages import Affine, CenterCrop, Flip, Pad, Perspective, RandomCrop, Rotate, WarpAffine
from tests.execute.kernels.interpret_color import fma
from tests.execute.kernels.quick_interpreter import use_large_tiles
from tests.execute.kernels.references import warp_reference
from tests.execute.kernels.turned import in_memory
from tests.host_stream import HostStream
from tests.stages.policies import Fixed

SIZES = ((48, 37), (1, 1), (17, 48), (5, 3))
TURN = ((0.7, -0.7, 9.3), (0.7, 0.7, -4.1))


def pipelines() -> list[tuple[str, tuple[Geometry, ...]]]:
    """Runs of stages that warp, for every interpolation and border."""
    found: list[tuple[str, tuple[Geometry, ...]]] = []
    flip, end = Flip(horizontal=0.5, vertical=0.5), CenterCrop(size=(21, 35))
    for kind, border in itertools.product(("nearest", "bilinear"), get_args(Border)):
        shared = {"interpolation": kind, "border": border, "fill": (9, 200, 50)}
        affine = Affine(degrees=90, translate=(0.2, 0.2), scale=(0.4, 2.0), shear=20.0, **shared)
        far = Perspective(distortion_scale=0.9, probability=0.7, **shared)
        same = Rotate(degrees=0, **shared)
        fixed = WarpAffine(matrix=TURN, size=30, **shared)
        found += [
            (f"affine {kind} {border}", (flip, affine, end)),
            (f"perspective {kind} {border}", (far, flip, CenterCrop(size=40))),
            (f"several {kind} {border}", (affine, flip, far, fixed, RandomCrop(size=29), flip)),
            (f"padded {kind} {border}", (fixed, RandomCrop(size=33, padding=5), flip)),
            (f"same {kind} {border}", (flip, same, end)),
        ]
    for border in (border for border in get_args(Border) if border != "constant"):
        found += [(f"pad {border}", (flip, Pad(padding=(2, 3, 4, 1), border=border), end))]
    return found


def difference_of_policy(name: str) -> float:
    """Of a policy's operation, on whole images of one size and on images of several sizes in tiles."""
    rng = np.random.default_rng(0)
    part = Fixed(name=name, magnitude=20.0 if name == "Rotate" else 0.2, fill=9).parts()[0]
    assert isinstance(part, Geometry) and part.warps is not None
    step, most = WarpStep((part,), (0,), 10**6, part.warps), 0
    for sizes in ([(40, 35)] * 2, [(140, 35), (33, 270)]):
        images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
        warping = step.draw(Keys(0, 0, np.arange(len(sizes))), *np.array(sizes).T)
        _held, places = in_memory(images)
        canvas = Canvas.allocate(HostStream(), warping, 3)  # type: ignore[arg-type]
        tiles = tiles_of(warping)
        plan = torch.from_numpy(plan_of(tiles.draw, places[tiles.image], canvas.offsets(tiles)))
        warp_all(plan, torch.arange(256).to(torch.uint8).expand(3, 256).contiguous(), canvas.tile, lookup=part.warps)
        for i, (image, top) in enumerate(zip(images, canvas.tops.tolist(), strict=True)):
            expected = warp_reference(image, warping, i)
            found = canvas.memory[top : top + image.shape[0], : image.shape[1]].numpy()
            most = max(most, int(np.abs(found.astype(int) - expected).max()))
    return float(most)


def difference(stages: tuple[Geometry, ...], channels: int, layout: str, dtype: torch.dtype) -> float:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, channels), dtype=np.uint8) for size in SIZES]
    heights, widths = np.array(SIZES).T
    key = next(stage.warps for stage in stages if stage.warps is not None)
    key = key if channels == 3 else key._replace(fill=key.fill[:1])
    step = WarpStep(stages, tuple(range(len(stages))), 10**6, key)
    warping = step.draw(Keys(0, 0, np.arange(len(SIZES))), heights, widths)
    rows = np.arange(len(SIZES))[::-1].copy()
    _held, places = in_memory(images)
    height, width = int(warping.height[0]), int(warping.width[0])
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    out = torch.full((len(SIZES), channels, height, width), -1.0).to(dtype).contiguous(memory_format=memory)
    plan = torch.from_numpy(warp_plan_of(warping, places, rows * out.stride(0)))
    table = torch.stack([torch.arange(256.0) + 256 * c for c in range(channels)]).to(dtype)
    warp_all(plan, table, out, lookup=key)
    expected = []
    for i, image in enumerate(images):
        seen = torch.from_numpy(warp_reference(image, warping, i)).permute(2, 0, 1).long()
        expected.append(torch.stack([values[channel] for values, channel in zip(table, seen, strict=True)]))
    return float((out[rows.tolist()].float() - torch.stack(expected).float()).abs().max())


if __name__ == "__main__":
    InterpreterBuilder.create_fma = fma
    few, *others = pipelines()
    print(f"{few[0]}, 3 channels nchw float32: {difference(few[1], 3, 'nchw', torch.float32)}", flush=True)
    for name in ("ShearX", "ShearY", "Rotate"):
        print(f"{name} of a policy: {difference_of_policy(name)}", flush=True)
    stages = pipelines()[17][1]
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
    for channels, layout, dtype in itertools.product((1, 3), ("nchw", "nhwc"), dtypes):
        if dtype == torch.float32 or channels == 1:
            print(f"{channels} {layout} {dtype}: {difference(stages, channels, layout, dtype)}", flush=True)
    use_large_tiles()
    for name, stages in others:
        print(f"{name}, 3 channels nchw float32: {difference(stages, 3, 'nchw', torch.float32)}", flush=True)
