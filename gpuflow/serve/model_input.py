"""Relates a model's input to the image: maps points back by matrices, bounds its size, and shows it as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch

from gpuflow.arrays import Bytes, Ints
from gpuflow.errors import PredictorError
from gpuflow.execute.cpu.runner import header_of
from gpuflow.pipeline.moves import Matrices
from gpuflow.pipeline.program import trace
from gpuflow.pipeline.stage import Decoder, ImageSpec, Keys, Pipeline
from gpuflow.pipeline.targets import PlacedMove, moves_of_stages, unsaid_move


def require_known_moves(pipeline: Pipeline | None, origin: str) -> Pipeline:
    """Return the pipeline. If a stage may move pixels without saying where to, raise PredictorError. origin: a file."""
    if pipeline is None:
        raise PredictorError(f"{origin}: has no stages that say where pixels go; load it with gpuflow.serve.load")
    if (place := unsaid_move(pipeline)) is not None:
        raise PredictorError(
            f"{origin}: serve.stages[{place}].{pipeline.stages[place].stage_name} may move pixels without saying "
            "where to, so there are no matrices; use a geometry stage of gpuflow"
        )
    return pipeline


def matrices_of(pipeline: Pipeline, files: Sequence[bytes]) -> Matrices:
    """Return for each file the map from a point of its preprocessed image to the point of the upright image, [N, 3, 3].

    files: encoded images that can be decoded.
    """
    decoder = pipeline.stages[0]
    assert isinstance(decoder, Decoder)
    found = [header_of(np.frombuffer(data, np.uint8), decoder).upright_size for data in files]
    sizes = np.array(found, np.int64).reshape(-1, 2)
    total = np.broadcast_to(np.eye(3), (len(files), 3, 3)).copy()
    for placed in _moves(pipeline, sizes):
        total = total @ np.linalg.inv(placed.matrix)
    return total


def most_pixels(pipeline: Pipeline, height: int, width: int) -> int:
    """Return the largest number of pixels that an image of this upright size has before, between or after the stages.

    It is the image's own number if a stage would make more than `decode.max_pixels`: such an image is refused before it
    is resized.
    """
    decoder = pipeline.stages[0]
    assert isinstance(decoder, Decoder)
    moves = _moves(pipeline, np.array([[height, width]], np.int64))
    most = max((int(placed.after[0][0] * placed.after[1][0]) for placed in moves), default=0)
    return max(height * width, most if most <= decoder.max_pixels else 0)


def _moves(pipeline: Pipeline, sizes: Ints) -> list[PlacedMove]:
    """Return each move of the stages on images of these sizes [N, 2]."""
    parts = ((stage, occurrence) for _, stage, occurrence in pipeline.parts())
    keys = Keys(0, 0, np.zeros(len(sizes), np.int64))  # nothing is drawn where a model is served
    return moves_of_stages(parts, keys, *sizes.T)


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
        """Return the pixels as a PNG file."""
        done, data = cv2.imencode(".png", self.pixels(image)[..., ::-1])
        assert done, "OpenCV writes PNG"
        return data.tobytes()


def _values_of_levels(pipeline: Pipeline) -> torch.Tensor | None:
    """Return each level's value after the stages that follow the last uint8 image: float32 [C, 256].

    Returns None if they have no form inside a model, or the values are not monotonic.
    """
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
    """Return the level whose value is nearest to each pixel: float32 [C, H, W] to uint8."""
    between = (values[:, 1:] + values[:, :-1]) / 2
    planes = [torch.bucketize(plane.contiguous(), edges) for plane, edges in zip(image, between, strict=True)]
    return torch.stack(planes).to(torch.uint8)
