"""letterbox: resizes an image so that it just fits into a box of fixed size, and centres it there on a fill."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import (
    Fill,
    Filling,
    Interpolation,
    ResizingStage,
    Size,
    moved_by_torchvision,
    of_size,
    size_pair,
)


@s.stage_class
class Letterbox(Filling, ResizingStage):
    """Resize an image so that it just fits into a box, keep its aspect ratio, and centre it on a fill, as detectors do.

    The side that does not fill the box is rounded to whole pixels; an odd rest of padding is at the bottom or right.

    Args:
        size: the box in pixels: the side of a square, or [height, width].
        fill: the level around the image, or [red, green, blue].
        interpolation: how pixels are resampled.
        antialias: widen the filter with the scale when the image shrinks, as PIL and torchvision do.

    Examples:
        >>> height, width = np.array([[480], [640]])
        >>> resize, pad = Letterbox(size=320).draw(s.Keys(0, 0, np.arange(1)).stage("letterbox", 0), height, width)
        >>> resize.height.tolist(), resize.width.tolist(), pad.top.tolist(), pad.bottom.tolist()
        ([240], [320], [40], [40])
    """

    stage_name = "letterbox"
    pads = True
    other_keys = {"new_shape": "size"}

    size: Size
    fill: Fill = 114
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    @classmethod
    def examples(cls) -> tuple[Letterbox, ...]:
        return (
            cls(size=40),
            cls(size=(30, 50), fill=(9, 200, 50), interpolation="bicubic"),
            cls(size=(150, 60), fill=0, antialias=False),
        )

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return of_size(super().output(spec), *size_pair(self.size))

    def torchvision(self) -> Any:
        return functools.partial(moved_by_torchvision, self)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        box_height, box_width = size_pair(self.size)
        tall = height * box_width >= width * box_height
        inner_height = np.where(tall, box_height, np.rint(height * box_width / width)).astype(np.int64)
        inner_width = np.where(tall, np.rint(width * box_height / height), box_width).astype(np.int64)
        inner_height, inner_width = np.clip(inner_height, 1, box_height), np.clip(inner_width, 1, box_width)
        top, left = (box_height - inner_height) // 2, (box_width - inner_width) // 2
        bottom, right = box_height - inner_height - top, box_width - inner_width - left
        return (
            self.resize(inner_height, inner_width),
            s.Pad(top, bottom, left, right, fill=self.padding_fill),
        )
