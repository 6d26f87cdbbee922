"""Runs stages and pipelines on the CPU as users do, and the same by torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.views import STORAGE, as_batch, slot_shape
from gpuflow.sources import Payload
from gpuflow.stages import Decode
from tests.images import as_array

RGB = s.ImageSpec(shape=(None, None, 3))
Batch = tuple[torch.Tensor, list[BadSampleError | None]]


def program_of(*stages: s.Stage, name: str = "test", serving: bool = False) -> Program:
    pipeline = s.Pipeline(name, stages)
    return fold(pipeline, trace(pipeline, serving=serving))


def keys_of(count: int, *, seed: int = 0, epoch: int = 0, first: int = 0) -> s.Keys:
    """Return the keys of samples with these positions; each has two boxes, for stages that take some."""
    positions = np.arange(first, first + count, dtype=np.int64)
    start = np.stack([positions % 7, positions % 11, 20 + positions % 5, 10 + positions % 3], axis=1).reshape(-1, 2, 2)
    boxes = np.concatenate([start, start + np.array([[15, 18], [22, 30]])], axis=2).astype(np.float64)
    return s.Keys(seed, epoch, positions, values={s.RecordValue(name, "boxes"): boxes for name in ("boxes", "objects")})


def run(program: Program, samples: Sequence[bytes], keys: s.Keys | None = None, chunk: int | None = None) -> Batch:
    """A batch of these samples, in calls of `chunk` samples each, and why each sample is bad."""
    keys = keys if keys is not None else keys_of(len(samples))
    slots = np.zeros((len(samples), *slot_shape(program.result)), STORAGE[program.result.dtype])
    runner = CpuRunner(program)
    faults: list[BadSampleError | None] = []
    step = chunk or max(len(samples), 1)
    for at in range(0, len(samples), step):
        part = keys.take(slice(at, at + step))
        faults += runner.run(Payload.of(samples[at : at + step]), part, slots[at : at + step])
    return as_batch(slots, program.result), faults


def images(program: Program, samples: Sequence[bytes], keys: s.Keys | None = None) -> torch.Tensor:
    """As `run`, where no sample may be bad: [N, C, H, W]."""
    batch, faults = run(program, samples, keys)
    assert faults == [None] * len(samples)
    return batch


def alone(stage: s.Stage, data: bytes, keys: s.Keys | None = None, *, color: str = "rgb") -> torch.Tensor:
    """What a stage makes of one image right behind the decoder, [C, H, W]."""
    return images(program_of(Decode(color=color), stage), [data], keys)[0]  # type: ignore[arg-type]


def decoded(data: bytes, color: str = "rgb") -> torch.Tensor:
    """OpenCV's pixels as a uint8 tensor [C, H, W]."""
    flags = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR_BGR, "gray": cv2.IMREAD_GRAYSCALE}[color]
    pixels: Any = cv2.imdecode(as_array(data), flags | cv2.IMREAD_IGNORE_ORIENTATION)
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def levels_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest difference between two uint8 images."""
    assert a.dtype == b.dtype == torch.uint8
    assert a.shape == b.shape
    return int((a.to(torch.int16) - b.to(torch.int16)).abs().max()) if a.numel() else 0


def size_of(image: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Height and width as the arrays [1] that `draw` takes."""
    return np.array([image.shape[-2]], np.int64), np.array([image.shape[-1]], np.int64)


def resized(image: torch.Tensor, size: tuple[int, int], interpolation: str, antialias: bool) -> torch.Tensor:
    """torchvision's resize. To one pixel it goes channel by channel: torch 2.11 fails on three planes at once."""
    planes = torch.split(image, 1) if size == (1, 1) else (image,)
    mode = InterpolationMode(interpolation)
    return torch.cat([tv.resize_image(plane, list(size), mode, antialias=antialias) for plane in planes])


def by_torchvision(stage: s.Geometry, image: torch.Tensor, keys: s.StageKeys) -> torch.Tensor:
    """The moves that a geometry stage draws, one after the other by torchvision's functions on a uint8 [C, H, W]."""
    for move in stage.draw(keys, *size_of(image)):
        match move:
            case s.Crop():
                y, x, height, width = (int(v[0]) for v in (move.y, move.x, move.height, move.width))
                image = tv.pad_image(image, [move.margin] * 4) if move.margin else image
                image = tv.crop_image(image, y + move.margin, x + move.margin, height, width)
            case s.Flip():
                image = tv.horizontal_flip_image(image) if move.horizontal[0] else image
                image = tv.vertical_flip_image(image) if move.vertical[0] else image
            case s.Resize():
                size = int(move.height[0]), int(move.width[0])
                image = resized(image, size, move.interpolation, move.antialias)
            case s.Pad():
                sides = [int(side[0]) for side in (move.left, move.top, move.right, move.bottom)]
                image = tv.pad_image(image, sides, list(move.fill), move.border)
            case s.Warp():
                if move.active is None or move.active[0]:
                    size = int(move.height[0]), int(move.width[0])
                    lookup = s.Lookup(move.interpolation, move.border, move.fill)
                    image = torch.from_numpy(
                        warped(image.numpy(), move.matrix[0], size, lookup).round().astype(np.uint8)
                    )
    return image


def warped(
    image: NDArray[np.uint8], matrix: NDArray[np.float64], size: tuple[int, int], lookup: s.Lookup
) -> NDArray[np.float64]:
    """An image [C, H, W] seen through a map of points of the result, in float64 and not rounded.

    At a constant border it blends as torchvision does: mask * (sum - fill) + fill.
    """
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    points = np.einsum("ij,jyx->iyx", matrix, np.stack([x, y, np.ones_like(x)]))
    lengths = image.shape[:0:-1]  # width, height
    if lookup.interpolation == "nearest":
        taps = [[(np.floor(points[i] / points[2] + 2.0**-20).astype(np.int64), np.ones(size))] for i in range(2)]
    else:
        places = [points[i] / points[2] - 0.5 for i in range(2)]
        floors = [np.floor(place).astype(np.int64) for place in places]
        taps = [
            [(floor, 1 - (place - floor)), (floor + 1, place - floor)]
            for place, floor in zip(places, floors, strict=True)
        ]
    total, mask = np.zeros((len(image), *size)), np.zeros(size)
    for column, weight_x in taps[0]:
        for row, weight_y in taps[1]:
            (column_in, seen_x), (row_in, seen_y) = (
                _inside(at, length, lookup.border) for at, length in zip((column, row), lengths, strict=True)
            )
            weight = weight_x * weight_y * (seen_x & seen_y)
            total += image[:, row_in, column_in] * weight
            mask += weight
    fill = np.broadcast_to(np.array(lookup.fill, np.float64), len(image))[:, None, None]
    return mask * (total - fill) + fill if lookup.border == "constant" else total


def _inside(at: NDArray[np.int64], length: int, border: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The pixel of the image that is seen at an index, and whether one is."""
    seen = np.ones(at.shape, bool)
    if border == "constant":
        seen = (at >= 0) & (at < length)
    elif border == "reflect" and length > 1:
        ways = np.concatenate([np.arange(length), np.arange(length - 2, 0, -1)])
        at = ways[at % len(ways)]
    elif border == "symmetric":
        ways = np.concatenate([np.arange(length), np.arange(length)[::-1]])
        at = ways[at % len(ways)]
    return at.clip(0, length - 1), seen
