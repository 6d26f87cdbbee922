"""What the kernels must give, in plain PyTorch or by the CPU's own functions, one image at a time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute.cpu.native_chunk import Records, run_filters, run_pointwise, run_records
from gpuflow.pipeline.pointwise import Filters, Operations
from gpuflow.pipeline.program import Warping


def adjust_reference(images: torch.Tensor, operations: Operations, table: torch.Tensor) -> torch.Tensor:
    """The reference for `adjust`: the CPU's operations, one image at a time; [N, C, H, W]."""
    results = []
    for i, pixels in enumerate(images.numpy()):
        image = torch.from_numpy(run_pointwise(pixels, operations, i, None, planes=False)).permute(2, 0, 1)
        results.append(torch.stack([values[plane.long()] for values, plane in zip(table, image, strict=True)]))
    return torch.stack(results)


def smooth_reference(images: torch.Tensor, filters: Filters, table: torch.Tensor) -> torch.Tensor:
    """The reference for `smooth`: the CPU's filters, one image at a time; [N, C, H, W]."""
    results = []
    for i, pixels in enumerate(images.numpy()):
        image = torch.from_numpy(run_filters(pixels, filters, i)).permute(2, 0, 1)
        results.append(torch.stack([values[plane.long()] for values, plane in zip(table, image, strict=True)]))
    return torch.stack(results)


def warp_reference(image: NDArray[np.uint8], warping: Warping, i: int) -> NDArray[np.uint8]:
    """The reference for `warp_all`: the CPU's result for image [H, W, C] of sample i."""
    records = Records()
    records.add_warping(warping)
    size = warping.height[i], warping.width[i], image.shape[2]
    return run_records(records, i, image, np.empty(size, np.uint8))


def sample_reference(
    images: list[torch.Tensor],
    plan: torch.Tensor,
    table: torch.Tensor,
    *,
    interpolation: str,
    antialias: bool,
    fill: tuple[float, ...] = (0,),
) -> torch.Tensor:
    """The reference for `sample` in plain PyTorch. images: uint8 [H_i, W_i, C]. Ignores the plan's
    columns that say where images are."""
    results = []
    for image, row in zip(images, plan[:, 3:].tolist(), strict=True):
        y, x, height, width, mirror_y, mirror_x, *grid, sy, sx, sh, sw, wy, wx, wh, ww, flip_y, flip_x, _ = row
        box = image[y : y + height, x : x + width].permute(2, 0, 1)[None].float()
        box = box.flip([axis for axis, on in ((2, mirror_y), (3, mirror_x)) if on])
        smooth = {"antialias": antialias, "align_corners": False} if interpolation != "nearest" else {}
        for size in ((height, grid[1]), grid):
            resized = torch.nn.functional.interpolate(box, size, mode=interpolation, **smooth)
            box = resized.add(0.5).floor().clamp(0, 255)
        levels = box[0].long()
        outside = torch.tensor(fill, dtype=torch.long).expand(len(levels))[:, None, None]
        shown = outside.repeat(1, *levels.shape[1:])
        rows, columns = slice(max(sy, 0), max(sy + sh, 0)), slice(max(sx, 0), max(sx + sw, 0))
        shown[:, rows, columns] = levels[:, rows, columns]
        window = outside.repeat(1, wh, ww)
        y0, x0, y1, x1 = max(wy, 0), max(wx, 0), min(wy + wh, grid[0]), min(wx + ww, grid[1])
        if y1 > y0 and x1 > x0:
            window[:, y0 - wy : y1 - wy, x0 - wx : x1 - wx] = shown[:, y0:y1, x0:x1]
        window = window.flip([axis for axis, on in ((1, flip_y), (2, flip_x)) if on])
        results.append(torch.stack([values[channel] for values, channel in zip(table, window, strict=True)]))
    return torch.stack(results)
