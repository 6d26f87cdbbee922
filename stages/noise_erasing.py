"""noise_erasing: fills random boxes of an image with noise, after normalize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, Ratio
from gpuflow.stages.random_erasing import NUMBERS, Count, Erasing

if TYPE_CHECKING:
    import torch

_MEAN, _DEVIATION = 0.45, 0.225
"""About those of ImageNet's levels, as parts of 255."""


@s.stage_class
class NoiseErasing(Erasing, s.Opaque):
    """Fill random boxes with normal noise of mean 0 and deviation 1 after normalize, as timm's RandomErasing does.

    Boxes are drawn as in `random_erasing`, which has no noise but is faster: this stage handles one image at a time,
    with the same noise on the CPU and the GPU. Before normalize, the noise is in levels: of mean 0.45 and deviation
    0.225, which are about ImageNet's, and cut to 0-255.

    Args:
        probability: of erasing boxes of an image.
        scale: the range of a box's area, as a part of the image's.
        ratio: the range of height / width, drawn with a uniform logarithm.
        noise: a number for each `pixel` and channel, or one for each channel of a `box` (timm's `rand`).
        count: the most boxes. Their number is drawn from 1 to `count`, and each gets that part of the area.
    """

    stage_name = "noise_erasing"
    moves_pixels = False
    other_keys = {"max_count": "count", "mode": "noise"}

    probability: Probability = 0.5
    scale: Annotated[tuple[float, float], s.Bounds(least=0, most=1, ascending=True)] = (0.02, 0.33)
    ratio: Ratio = (0.3, 3.3)
    noise: Literal["pixel", "box"] = "pixel"
    count: Count = 1

    @classmethod
    def examples(cls) -> tuple[NoiseErasing, ...]:
        return (
            cls(),
            cls(probability=1.0, scale=(0.1, 0.4), ratio=(0.5, 1.5), noise="box", count=3),
        )

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_decoded(self, spec)
        return spec

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)
        numbers = torch.rand(1, NUMBERS * self.count, generator=generator, dtype=torch.float64, device="cpu").numpy()
        channels, height, width = image.shape
        result = image.clone()
        for active, boxes, _ in self.drawn_boxes(numbers, np.array([height]), np.array([width])):
            if active[0]:
                y, x, tall, wide = boxes[0].tolist()
                shape = (channels, tall, wide) if self.noise == "pixel" else (channels, 1, 1)
                noise = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
                if image.dtype == torch.uint8:
                    noise = (255 * (_MEAN + _DEVIATION * noise)).round().clamp(0, 255)
                result[:, y : y + tall, x : x + wide] = noise.to(result)
        return result
