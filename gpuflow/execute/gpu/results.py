"""Memory for the results of passes on a GPU: rows of tensors, or a canvas, which holds results of differing sizes.

The kernels are compiled for one size of the results. So on a canvas, each image's result is cut into square tiles of
one size, and a kernel computes each tile as if it were a separate image, with the geometry shifted to the tile's place.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from gpuflow.arrays import Ints
from gpuflow.execute.gpu.device_stream import DeviceStream, allocate_slots
from gpuflow.pipeline.program import Resampling, Warping
from gpuflow.pipeline.stage import ImageSpec

TILE = 128
"""The side of a tile, in pixels. Every image has room for whole tiles."""


class Tiles(NamedTuple):
    """The tiles of n results, each described as a separate result.

    draw: the geometry of each of M tiles. image [M]: which of the n images it belongs to. tops, lefts [M]: the row and
    column at which it begins on a canvas.
    """

    draw: Resampling | Warping
    image: Ints
    tops: Ints
    lefts: Ints


class Canvas(NamedTuple):
    """Interleaved uint8 images of differing sizes. memory: [rows, width, C]. tops [n]: the first row of each image."""

    memory: torch.Tensor
    tops: Ints

    @classmethod
    def allocate(cls, device_stream: DeviceStream, draw: Resampling | Warping, channels: int) -> Canvas:
        """Allocate memory for the results of a resampling or a warp of n images."""
        tops, rows, width = _layout(draw)
        with device_stream.queued():
            shape = rows, width, channels
            return cls(torch.empty(shape, dtype=torch.uint8, device=device_stream.device), tops)

    @property
    def pitch(self) -> int:
        """Return the bytes of a row."""
        return self.memory.stride(0)

    @property
    def addresses(self) -> Ints:
        """Return the address of each image, [n]."""
        return self.memory.data_ptr() + self.tops * self.pitch

    @property
    def tile(self) -> torch.Tensor:
        """Return the first tile, uint8 [1, C, TILE, TILE]: what a kernel's `out` is."""
        channels = self.memory.shape[2]
        return self.memory.as_strided((1, channels, TILE, TILE), (TILE, 1, self.pitch, channels))

    def offsets(self, tiles: Tiles) -> Ints:
        """Return how many elements after the canvas's first one each tile begins."""
        return tiles.tops * self.pitch + tiles.lefts * self.memory.shape[2]


Target = torch.Tensor | Canvas
"""Where a pass puts its results: slots [N, C, H, W], or a canvas while they differ in size."""


class ImageRows(NamedTuple):
    """Some images of a target: rows [n] of a tensor, or all of a canvas."""

    images: Target
    rows: Ints

    @property
    def tensor(self) -> torch.Tensor:
        """Return the target, of images that have one size."""
        assert not isinstance(self.images, Canvas), "these images differ in size"
        return self.images

    @property
    def addresses(self) -> Ints:
        """Return the address of each image, [n]."""
        return self.tensor.data_ptr() + self.rows * (self.tensor.stride(0) * self.tensor.element_size())

    @property
    def image_bytes(self) -> int:
        """Return the size of an image in bytes; 0 if it is not one block of memory."""
        _, channels, height, width = self.tensor.shape
        blocks = (height * width, width, 1), (1, width * channels, channels)
        size = channels * height * width * self.tensor.element_size()
        return size if self.tensor.stride()[1:] in blocks else 0

    def offsets_from(self, target: torch.Tensor) -> Ints:
        """Return how many elements after the target's first one each image begins, [n].

        The target is on the same device and has the same strides, but may be another allocation.
        """
        images = self.tensor
        between, rest = divmod(images.data_ptr() - target.data_ptr(), target.element_size())
        assert rest == 0 and images.stride()[1:] == target.stride()[1:]
        return between + self.rows * images.stride(0)


class LaterResults:
    """Memory for a fixed number of images for each output of a program, allocated when it is first needed.

    If each call allocated memory for its own images, torch would keep a block for each number of images
    (experiments/real_data/NOTES.md). One thread at a time may call the methods; any thread may delete rows.

    specs: of the results of each output's first pass. images: for each of them a tensor [K, C, H, W].
    """

    def __init__(self, device_stream: DeviceStream, specs: Sequence[ImageSpec]) -> None:
        self._device_stream, self._specs = device_stream, specs
        self._free: deque[int] = deque()
        self.images: list[torch.Tensor] = []

    def reserve(self, images: int) -> int:
        """Return the number of free rows. The first call allocates memory for this number of images."""
        if not self.images:
            self.images = [allocate_slots(self._device_stream, images, spec) for spec in self._specs]
            self._free.extend(range(images))
        return len(self._free)

    def take(self, count: int) -> list[ImageRows]:
        """Take `count` rows of each output's images. At least that many must be free.

        They are free again once the array of their numbers is deleted, which all that is returned shares. Work that is
        queued on the loader's stream after that may overwrite them, so work that reads them must be queued before.
        """
        rows = np.array([self._free.popleft() for _ in range(count)], np.int64)
        weakref.finalize(rows, self._free.extend, rows.tolist())
        return [ImageRows(images, rows) for images in self.images]


def _layout(draw: Resampling | Warping) -> tuple[Ints, int, int]:
    """Return the first row of each result on a canvas, the canvas's rows, and its width."""
    height, width = (_up(side) for side in draw.size)
    return np.cumsum(height) - height, int(height.sum()), int(width.max(initial=TILE))


def _up(sides: Ints) -> Ints:
    """Round sides of images up to whole tiles."""
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
    """Return the geometry of tiles that begin at (top, left) of the results of these images."""
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
