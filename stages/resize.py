"""resize: resamples to a fixed size, or so that the shorter or the longer side gets a given length."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.errors import Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import (
    Interpolation,
    ResizingStage,
    Side,
    moved_by_torchvision,
    of_size,
    resampling_transform,
)


@s.stage_class
class Resize(ResizingStage):
    """Resample an image to `height` and `width`, or to the length of its `shorter` or its `longer` side.

    Args:
        height: the result's height in pixels; needs `width` too.
        width: the result's width in pixels; needs `height` too.
        shorter: the length of the shorter side in pixels; the longer one follows the aspect ratio.
        longer: the length of the longer side in pixels; the shorter one follows the aspect ratio.
        max_size: with `shorter`, the most pixels of the longer side: the shorter one is less than asked for where the
            longer one would be more, as with torchvision's Resize.
        interpolation: how pixels are resampled.
        antialias: widen the filter with the scale when the image shrinks, as PIL and torchvision do.
        rounding: how the side that follows is rounded: `down`, as torchvision and transformers do, or to the `nearest`
            number, as Albumentations and timm's ResizeKeepRatio do.

    Examples:
        >>> str(Resize(shorter=256).output(s.ImageSpec(shape=(512, 768, 3))))
        'uint8 256x384x3 hwc'
    """

    stage_name = "resize"
    late_fields = ("rounding", "max_size")
    other_names = ("SmallestMaxSize", "LongestMaxSize")
    other_keys = {"size": "shorter", "min_size": "shorter"}

    height: Side | None = None
    width: Side | None = None
    shorter: Side | None = None
    longer: Side | None = None
    max_size: Side | None = None
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    rounding: Literal["down", "nearest"] = "down"

    @classmethod
    def examples(cls) -> tuple[Resize, ...]:
        return (
            cls(height=20, width=31),
            cls(height=150, width=70, antialias=False),
            cls(height=20, width=70),
            cls(shorter=24, interpolation="bicubic"),
            cls(shorter=30),
            cls(longer=40, interpolation="nearest"),
            cls(longer=50),
            cls(shorter=31, rounding="nearest"),
            cls(shorter=30, max_size=43),
            cls(shorter=29, max_size=40, rounding="nearest"),
        )

    def faults(self) -> Iterator[Problem]:
        ways = [(self.height, self.width) != (None, None), self.shorter is not None, self.longer is not None]
        if sum(ways) != 1 or (self.height is None) != (self.width is None):
            rule = "needs height and width, or shorter, or longer"
            yield Problem.of((), rule, action="give one of these", code="config.conflict")
        elif self.max_size is not None and self.shorter is None:
            rule = "limits the side that follows shorter, which is not given"
            yield Problem.of("max_size", rule, action="give shorter, or longer alone", code="config.conflict")
        elif self.max_size is not None and self.shorter is not None and self.max_size <= self.shorter:
            rule = f"must be more than shorter = {self.shorter}"
            yield Problem.of("max_size", rule, self.max_size, code="config.conflict")

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        result, (height, width, _) = super().output(spec), spec.shape
        if self.height is not None:
            return of_size(result, self.height, self.width)
        if height is None or width is None:
            return result.replace(shorter=None if self.max_size else self.shorter)
        return of_size(result, *(int(side[0]) for side in self._size(np.array([height]), np.array([width]))))

    def _size(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        if self.height is not None and self.width is not None:
            return np.full_like(height, self.height), np.full_like(width, self.width)
        if self.shorter is not None:
            known, target = np.minimum(height, width), self.shorter
        else:
            assert self.longer is not None
            known, target = np.maximum(height, width), self.longer
        sides = self._scaled(height, width, target, known)
        if self.max_size is not None:
            longer = np.maximum(*sides)
            limited = self._scaled(*sides, self.max_size, longer)
            height, width = (np.where(longer > self.max_size, *both) for both in zip(limited, sides, strict=True))
            return height, width
        return sides

    def _scaled(self, height: Ints, width: Ints, target: int, known: Ints) -> tuple[Ints, Ints]:
        """Return sizes in proportion, in which the sides of length `known` become `target`."""
        exact = (target * side / known for side in (height, width))
        whole = ((np.rint(side) if self.rounding == "nearest" else side).astype(np.int64) for side in exact)
        other_height, other_width = (np.maximum(side, 1) for side in whole)
        return np.where(height == known, target, other_height), np.where(width == known, target, other_width)

    def torchvision(self) -> Any:
        if self.rounding == "nearest":
            return functools.partial(moved_by_torchvision, self)
        size = self.shorter if self.height is None else (self.height, self.width)
        most = self.longer or self.max_size  # torchvision sets the longer side only through max_size
        return resampling_transform("Resize", self.interpolation, size=size, max_size=most, antialias=self.antialias)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        return (self.resize(*self._size(height, width)),)
