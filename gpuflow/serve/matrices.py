"""Computes what the stages of `serve` do to images: matrices that map a model's boxes back, and results' sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.errors import PredictorError
from gpuflow.execute.cpu.runner import header_of
from gpuflow.pipeline.moves import Matrices
from gpuflow.pipeline.stage import Decoder, Keys, Pipeline
from gpuflow.pipeline.targets import PlacedMove, moves_of_stages, unsaid_move


def require_known_moves(pipeline: Pipeline | None, origin: str) -> Pipeline:
    """The pipeline. Raises PredictorError if a stage may move pixels without saying where to. origin: the file."""
    if pipeline is None:
        raise PredictorError(f"{origin}: has no stages that say where pixels go; load it with gpuflow.serve.load")
    if (place := unsaid_move(pipeline)) is not None:
        raise PredictorError(
            f"{origin}: serve.stages[{place}].{pipeline.stages[place].stage_name} may move pixels without saying "
            "where to, so there are no matrices; use a geometry stage of gpuflow"
        )
    return pipeline


def matrices_of(pipeline: Pipeline, files: Sequence[bytes]) -> Matrices:
    """For each file, the map from a point of its preprocessed image to the point of the upright image, [N, 3, 3].

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
    """The largest number of pixels that an image of this upright size has before, between or after the stages.

    It is the image's own number if a stage would make more than `decode.max_pixels`: such an image is refused before it
    is resized.
    """
    decoder = pipeline.stages[0]
    assert isinstance(decoder, Decoder)
    moves = _moves(pipeline, np.array([[height, width]], np.int64))
    most = max((int(placed.after[0][0] * placed.after[1][0]) for placed in moves), default=0)
    return max(height * width, most if most <= decoder.max_pixels else 0)


def _moves(pipeline: Pipeline, sizes: Ints) -> list[PlacedMove]:
    """Each move of the stages on images of these sizes [N, 2]."""
    parts = ((stage, occurrence) for _, stage, occurrence in pipeline.parts())
    keys = Keys(0, 0, np.zeros(len(sizes), np.int64))  # nothing is drawn where a model is served
    return moves_of_stages(parts, keys, *sizes.T)
