"""Pictures of a model's input: turns the tensor back into pixels by undoing the last stages of its pipeline."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch

from gpuflow.arrays import Bytes
from gpuflow.pipeline.stage import ImageSpec, Pipeline
from gpuflow.pipeline.validate import trace


class Pictures:
    """Turns images [C, H, W] of a pipeline into pixels, uint8 [H, W, 3] in RGB.

    Stages that have a form inside a model are undone exactly: each pixel is the level whose value is nearest. Other
    stages cannot be undone; their values are scaled, the smallest to black and the largest to white.

    Args:
        image: what the pipeline gives.
        pipeline: its stages; without them values are scaled.
    """

    def __init__(self, image: ImageSpec, pipeline: Pipeline | None) -> None:
        self._spec = image
        self._values = None if pipeline is None or image.dtype == "uint8" else _values_of_levels(pipeline)

    def pixels(self, image: torch.Tensor) -> Bytes:
        image = image.cpu()
        if self._values is not None:
            image = _nearest(image.float(), self._values)
        elif self._spec.dtype != "uint8":
            low, high = image.float().aminmax()
            image = ((image.float() - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
        if self._spec.color == "bgr":
            image = image.flip(0)
        color = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
        return np.ascontiguousarray(color.permute(1, 2, 0).numpy())

    def png(self, image: torch.Tensor) -> bytes:
        """The pixels as a PNG file."""
        done, data = cv2.imencode(".png", self.pixels(image)[..., ::-1])
        assert done, "OpenCV writes PNG"
        return data.tobytes()


def _values_of_levels(pipeline: Pipeline) -> torch.Tensor | None:
    """Each level's value after the stages that follow the last uint8 image: float32 [C, 256]; None if not monotonic."""
    specs = trace(pipeline)
    last = max(i for i, spec in enumerate(specs) if spec.dtype == "uint8")
    modules: list[Any] = [stage.module() for stage in pipeline.stages[last:]]
    if None in modules:
        return None
    levels = torch.arange(256, dtype=torch.uint8, device="cpu").expand(1, specs[last].shape[2], 1, 256)
    for module in modules:
        levels = module(levels)
    values: torch.Tensor = levels[0, :, 0].float()
    return values if bool((values.diff() >= 0).all()) else None


def _nearest(image: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The level whose value is nearest, for each pixel: float32 [C, H, W] to uint8."""
    between = (values[:, 1:] + values[:, :-1]) / 2
    planes = [torch.bucketize(plane.contiguous(), edges) for plane, edges in zip(image, between, strict=True)]
    return torch.stack(planes).to(torch.uint8)
