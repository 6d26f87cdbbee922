"""warp_affine: warps every image by one given affine map, in OpenCV's conventions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpuflow.errors import Problem
from gpuflow.pipeline import stage as s
from gpuflow.stages.center_crop import Size, size_pair
from gpuflow.stages.rotate import Border, Fill, WarpInterpolation, check_fill, lookup_of

__all__ = ["WarpAffine"]

Row = tuple[float, float, float]
Point = tuple[float, float]
Points = tuple[Point, Point, Point]

_HALF = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
"""Maps indices of pixels, OpenCV's coordinates, to points of which (0, 0) is the image's corner."""


@dataclass(frozen=True, kw_only=True, repr=False)
class WarpAffine(s.Geometry):
    """Warp an image by an affine map of the indices of its pixels, as cv2.warpAffine does.

    Args:
        matrix: the map of the image's points (x, y) to those of the result: two rows of three numbers.
        source: instead of a matrix, three points [x, y] of the image.
        target: where the points in `source` come to lie in the result.
        inverse_map: whether the map takes the result's points to those of the image, as WARP_INVERSE_MAP says.
        size: the result in pixels: the side of a square, or [height, width]; by default the image's own size.
        interpolation: how pixels are resampled, without antialiasing.
        border: what is seen outside the image: `constant` levels, the pixel at the `edge`, or the image again, as in a
            mirror: `reflect`.
        fill: the level of a constant border, or [red, green, blue].
    """

    stage_name: ClassVar[str] = "warp_affine"
    tolerance: ClassVar[float] = 1.0

    matrix: tuple[Row, Row] | None = None
    source: Points | None = None
    target: Points | None = None
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

    def faults(self) -> Iterator[Problem]:
        points = (self.source is not None, self.target is not None)
        if points not in ((True, True), (False, False)) or points[0] == (self.matrix is not None):
            rule = "needs a matrix, or source and target"
            yield Problem.of((), rule, action="give one of these", code="config.conflict")
            return
        if self.matrix is not None:
            if not _independent(np.array(self.matrix)[:, :2]):
                yield Problem.of("matrix", "must be invertible", self.matrix, code="config.range")
            return
        for name in ("source", "target"):
            points_of = np.array(getattr(self, name))
            if not _independent(points_of[1:] - points_of[0]):
                yield Problem.of(
                    name, "must be points that do not lie on one line", points_of.tolist(), code="config.range"
                )

    @property
    def warps(self) -> s.Lookup:
        return lookup_of(self.interpolation, self.border, self.fill)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        check_fill(self.fill, spec)
        return spec if self.size is None else spec.replace(shape=(*size_pair(self.size), spec.shape[2]))

    def torchvision(self) -> Any:
        raise NotImplementedError

    def _map(self) -> s.Matrices:
        """The map of a point of the result to the point of the image, [3, 3]."""
        if self.matrix is not None:
            given = np.array([*self.matrix, (0, 0, 1)], np.float64)
        else:
            source, target = (np.column_stack([np.array(side), np.ones(3)]).T for side in (self.source, self.target))
            given = target @ np.linalg.inv(source)
            given[2] = 0, 0, 1
        back = given if self.inverse_map else np.linalg.inv(given)
        back[2] = 0, 0, 1
        shifted: s.Matrices = _HALF @ back @ np.linalg.inv(_HALF)
        return shifted

    def draw(self, keys: s.StageKeys, height: s.Ints, width: s.Ints) -> tuple[s.Move, ...]:
        matrix = np.broadcast_to(self._map(), (len(height), 3, 3)).copy()
        if self.size is not None:
            height, width = (np.full_like(height, side) for side in size_pair(self.size))
        return (s.Warp(matrix, height, width, *self.warps),)


def _independent(vectors: Any) -> bool:
    """Whether two vectors do not lie on one line."""
    (a, b), (c, d) = vectors
    return bool(abs(a * d - b * c) > 1e-9 * (abs(a * d) + abs(b * c)))
