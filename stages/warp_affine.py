"""warp_affine: warps images by a given affine map, one for all or each sample's own, in OpenCV's conventions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.errors import Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Border, Fill, Size, WarpingStage, WarpInterpolation, of_size, size_pair
from gpuflow.pipeline.records import LARGEST, independent

_Row = tuple[float, float, float]
_Point = tuple[float, float]
Matrix = Annotated[tuple[_Row, _Row], s.Bounds(limit=LARGEST)]
Points = Annotated[tuple[_Point, _Point, _Point], s.Bounds(limit=LARGEST)]

_HALF = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
"""Maps indices of pixels, OpenCV's coordinates, to points of which (0, 0) is the image's corner."""
_LAST = (0.0, 0.0, 1.0)
"""The last row of an affine map."""


@s.stage_class
class WarpAffine(WarpingStage):
    """Warp an image by an affine map of the indices of its pixels, as cv2.warpAffine does.

    The map is one for all images, or with `{field: NAME}` each sample's own, from its record.

    Args:
        matrix: the map of the image's points (x, y) to those of the result: two rows of three numbers, or the field
            that has them.
        source: instead of a matrix, three points [x, y] of the image, or the field that has them: the first three of
            a list, or of keypoints.
        target: where the points in `source` come to lie in the result, or the field that says so.
        inverse_map: whether the map takes the result's points to those of the image, as WARP_INVERSE_MAP says.
        size: the result in pixels: the side of a square, or [height, width]; by default the image's own size.
        interpolation: how pixels are resampled, without antialiasing.
        border: what is seen outside the image: `constant` levels, the pixel at the `edge`, or the image again, as in a
            mirror: `reflect` without the pixel at the edge, `symmetric` with it.
        fill: the level of a constant border, or [red, green, blue].
    """

    stage_name = "warp_affine"

    matrix: Matrix | s.FromRecord | None = None
    source: Points | s.FromRecord | None = None
    target: Points | s.FromRecord | None = None
    inverse_map: bool = False
    size: Size | None = None
    interpolation: WarpInterpolation = "bilinear"
    border: Border = "constant"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[WarpAffine, ...]:
        corners = ((0.0, 0.0), (40.0, 0.0), (0.0, 40.0))
        turned = ((5.0, 10.0), (43.0, 2.0), (9.0, 50.0))
        return (
            cls(matrix=((0.9, 0.2, 3.5), (-0.1, 1.1, 4.25))),
            cls(matrix=((1.2, 0.0, -8.0), (0.0, 0.8, 5.0)), inverse_map=True, size=(30, 40), border="edge"),
            cls(source=corners, target=turned, fill=114, interpolation="nearest"),
            cls(source=turned, target=corners, border="reflect"),
            cls(source=corners, target=corners),
        )

    def faults(self) -> Iterator[Problem | tuple[Any, ...]]:
        points = (self.source is not None, self.target is not None)
        if points not in ((True, True), (False, False)) or points[0] == (self.matrix is not None):
            rule = "needs a matrix, or source and target"
            yield Problem.of((), rule, action="give one of these", code="config.conflict")
            return
        if _is_numbers(self.matrix) and not independent(np.array(self.matrix)[:, :2]):
            yield "matrix", "must be invertible", self.matrix
        for name, given in (("source", self.source), ("target", self.target)):
            if _is_numbers(given) and not independent(np.array(given)[1:] - np.array(given)[0]):
                yield name, "must be points that do not lie on one line", given

    @property
    def record_values(self) -> Mapping[str, s.RecordValue]:
        given = {"matrix": self.matrix, "source": self.source, "target": self.target}
        return {
            name: s.RecordValue(value.field, "matrix" if name == "matrix" else "points")
            for name, value in given.items()
            if isinstance(value, s.FromRecord)
        }

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        spec = super().output(spec)
        return spec if self.size is None else of_size(spec, *size_pair(self.size))

    def _map(self, keys: s.StageKeys) -> s.Matrices:
        """Return the map of the result's points to the image's: [3, 3], or one for each sample, [N, 3, 3]."""
        if self.matrix is not None:
            rows = self._numbers("matrix", keys)
            given = np.concatenate([rows, np.broadcast_to(_LAST, (*rows.shape[:-2], 1, 3))], axis=-2)
        else:
            sides = (self._numbers(name, keys) for name in ("source", "target"))
            source, target = (_as_columns(side) for side in sides)
            given = target @ np.linalg.inv(source)
            given[..., 2, :] = _LAST
        back = given if self.inverse_map else np.linalg.inv(given)
        back[..., 2, :] = _LAST
        shifted: s.Matrices = _HALF @ back @ np.linalg.inv(_HALF)
        return shifted

    def _numbers(self, name: str, keys: s.StageKeys) -> Floats:
        """Return the numbers of a parameter, or of each sample's record, [N, ...]."""
        if (value := self.record_values.get(name)) is not None:
            return keys.values[value]
        return np.array(getattr(self, name), np.float64)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        matrix = np.broadcast_to(self._map(keys), (len(height), 3, 3)).copy()
        if self.size is not None:
            height, width = (np.full_like(height, side) for side in size_pair(self.size))
        return (s.Warp(matrix, height, width, *self.warps),)


def _is_numbers(given: object) -> bool:
    """Return True if numbers are given, and not the field that has them."""
    return given is not None and not isinstance(given, s.FromRecord)


def _as_columns(points: Floats) -> s.Matrices:
    """Return three points [..., 3, 2] as the columns of a matrix, with a third coordinate of 1."""
    rows: s.Matrices = np.concatenate([points, np.ones((*points.shape[:-1], 1))], axis=-1)
    return rows.swapaxes(-1, -2)
