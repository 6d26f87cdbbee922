"""zoom_out: places an image at random on a larger canvas, so that its objects become small."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, Filling, Probability, of_size


@s.stage_class
class ZoomOut(Filling):
    """Place an image at random on a canvas of its aspect ratio, as torchvision's RandomZoomOut does (SSD's expand).

    Args:
        scale: the canvas's sides as multiples of the image's are drawn from [low, high].
        fill: the level of the canvas, or [red, green, blue].
        probability: of placing an image on a canvas; others stay as they are.

    Examples:
        >>> height, width = np.array([[48], [64]])
        >>> (pad,) = ZoomOut(scale=(2, 2), probability=1).draw(s.StageKeys(0, 0, np.arange(1)), height, width)
        >>> (pad.top + pad.bottom).tolist(), (pad.left + pad.right).tolist()
        ([48], [64])
    """

    stage_name = "zoom_out"
    other_names = ("RandomZoomOut",)
    other_keys = {"side_range": "scale"}

    scale: Annotated[tuple[float, float], s.Bounds(least=1, limit=1000, ascending=True)] = (1.0, 4.0)
    fill: Fill = 0
    probability: Probability = 0.5

    @classmethod
    def examples(cls) -> tuple[ZoomOut, ...]:
        return (cls(), cls(scale=(1.5, 2.0), fill=(9, 200, 50), probability=0.9))

    @property
    def random(self) -> bool:
        return self.pads

    @property
    def pads(self) -> bool:
        return self.probability > 0 and self.scale[1] > 1

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        spec = super().output(spec)
        return of_size(spec, None, None) if self.pads else spec

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomZoomOut(self.fill, self.scale, self.probability)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        chance, size, x, y = keys.uniform(4).T
        scale = np.where(chance < self.probability, self.scale[0] + size * (self.scale[1] - self.scale[0]), 1.0)
        wider, taller = ((side * scale).astype(np.int64) - side for side in (width, height))
        left, top = (wider * x).astype(np.int64), (taller * y).astype(np.int64)
        return (s.Pad(top, taller - top, left, wider - left, fill=self.padding_fill),)
