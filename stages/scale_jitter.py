"""scale_jitter: resamples an image by a random scale of the size at which it just fits into a box."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Interpolation, ResizingStage, Size, resampling_transform, size_pair


@s.stage_class
class ScaleJitter(ResizingStage):
    """Resample an image by a random scale, as torchvision's ScaleJitter does.

    At scale 1 the image just fits into the box; its aspect ratio stays. Large scale jitter is this stage and
    `random_crop: {size: 1024, pad_if_needed: true}`, which makes one size of all images.

    Args:
        size: the box in pixels: the side of a square, or [height, width].
        scale: the scale is drawn from [low, high].
        interpolation: how pixels are resampled.
        antialias: widen the filter with the scale when the image shrinks, as PIL and torchvision do.
    """

    stage_name = "scale_jitter"
    other_keys = {"target_size": "size", "scale_range": "scale"}

    size: Size
    scale: Annotated[tuple[float, float], s.Bounds(least=0.001, limit=1000, ascending=True)] = (0.1, 2.0)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    @classmethod
    def examples(cls) -> tuple[ScaleJitter, ...]:
        return (
            cls(size=40),
            cls(size=(30, 50), scale=(0.5, 1.5), interpolation="bicubic", antialias=False),
            cls(size=(31, 47), scale=(1.0, 1.0)),
        )

    @property
    def random(self) -> bool:
        return self.scale[0] != self.scale[1]

    def torchvision(self) -> Any:
        box: dict[str, Any] = {"target_size": size_pair(self.size)[::-1], "scale_range": self.scale}
        return resampling_transform("ScaleJitter", self.interpolation, antialias=self.antialias, **box)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        (low, high), (box_height, box_width) = self.scale, size_pair(self.size)
        scale = low + keys.uniform(1)[:, 0] * (high - low)
        factor = np.minimum(box_height / height, box_width / width) * scale
        tall, wide = (np.maximum((side * factor).astype(np.int64), 1) for side in (height, width))
        return (self.resize(tall, wide),)
