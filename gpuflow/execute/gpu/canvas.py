"""Results of differing sizes on a GPU: one above the other in one block of memory, made in tiles of one size.

The kernels are compiled for one size of the results. So each image's result is cut into square tiles of one size, and a
kernel computes each tile as if it were a separate image, with the geometry shifted to the tile's place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from gpuflow.arrays import Ints
from gpuflow.execute.gpu.device_stream import DeviceStream
from gpuflow.pipeline.program import Resampling, Warping

TILE = 128
"""The side of a tile, in pixels. Every image has room for whole tiles."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of n results, each described as a separate result.

    draw: the geometry of each of M tiles. image [M]: which of the n images it belongs to. tops, lefts [M]: the row and
    column at which it begins on a canvas.
    """

    draw: Resampling | Warping
    image: Ints
    tops: Ints
    lefts: Ints


@dataclass(frozen=True, slots=True)
class Canvas:
    """Interleaved uint8 images of differing sizes. memory: [rows, width, C]. tops [n]: the first row of each image."""

    memory: torch.Tensor
    tops: Ints

    @classmethod
    def allocate(cls, device_stream: DeviceStream, draw: Resampling | Warping, channels: int) -> Canvas:
        """Room for the results of a resampling or a warp of n images."""
        tops, rows, width = _layout(draw)
        with device_stream.queued():
            shape = rows, width, channels
            return cls(torch.empty(shape, dtype=torch.uint8, device=device_stream.device), tops)

    @property
    def pitch(self) -> int:
        """The bytes of a row."""
        return self.memory.stride(0)

    @property
    def addresses(self) -> Ints:
        """Of the images' first bytes, [n]."""
        return self.memory.data_ptr() + self.tops * self.pitch

    @property
    def tile(self) -> torch.Tensor:
        """The first tile, uint8 [1, C, TILE, TILE]: what a kernel's `out` is."""
        channels = self.memory.shape[2]
        return self.memory.as_strided((1, channels, TILE, TILE), (TILE, 1, self.pitch, channels))

    def offsets(self, tiles: Tiles) -> Ints:
        """How many elements after the canvas's first one each tile begins."""
        return tiles.tops * self.pitch + tiles.lefts * self.memory.shape[2]


def _layout(draw: Resampling | Warping) -> tuple[Ints, int, int]:
    """The first row of each result on a canvas, the canvas's rows, and its width."""
    height, width = (_up(side) for side in draw.size)
    return np.cumsum(height) - height, int(height.sum()), int(width.max(initial=TILE))


def _up(sides: Ints) -> Ints:
    """Sides of images, rounded up to whole tiles."""
    whole: Ints = -(-np.asarray(sides, np.int64) // TILE) * TILE
    return whole


def tiles_of(draw: Resampling | Warping) -> Tiles:
    """Cut the results of a resampling or a warp of n images into tiles. Beyond its result a tile is undefined."""
    height, width = draw.size
    first, _, _ = _layout(draw)
    down, across = _up(height) // TILE, _up(width) // TILE
    count = down * across
    image = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(image)) - np.repeat(np.cumsum(count) - count, count)
    top, left = number // across[image] * TILE, number % across[image] * TILE
    return Tiles(_part(draw, image, top, left), image, first[image] + top, left)


def _part(draw: Resampling | Warping, image: Ints, top: Ints, left: Ints) -> Resampling | Warping:
    """The geometry of tiles that begin at (top, left) of the results of these images."""
    sides = np.full(len(image), TILE)
    if isinstance(draw, Warping):
        matrix, shown = draw.matrix[image].copy(), draw.shown[image].copy()
        if not draw.lookup.as_torchvision:  # whose places depend on the whole result; the kernel takes it from `shown`
            matrix[:, :, 2] += matrix[:, :, 0] * left[:, None] + matrix[:, :, 1] * top[:, None]
        shown[:, 0] -= top
        shown[:, 1] -= left
        return replace(draw, box=draw.box[image], matrix=matrix, height=sides, width=sides, shown=shown, misfits=())
    y, x, height, width = draw.window[image].T
    flips = draw.flips[image].astype(bool)  # of a mirrored result, the first tile is the last part of the window
    y = y + np.where(flips[:, 0], height - top - TILE, top)
    x = x + np.where(flips[:, 1], width - left - TILE, left)
    return replace(
        draw,
        box=draw.box[image],
        mirrors=draw.mirrors[image],
        grid=draw.grid[image],
        shown=draw.shown[image],
        window=np.stack([y, x, sides, sides], axis=1),
        flips=draw.flips[image],
        misfits=(),
    )
