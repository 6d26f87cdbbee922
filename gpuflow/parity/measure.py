"""Measures differences between two images in levels of 0-255, and gathers them over many images."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.arrays import Bytes
from gpuflow.decode.preset import Preset
from gpuflow.errors import GpuflowError
from gpuflow.execute.cpu.runner import run_files
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Pointwise

Differences = Bytes | NDArray[np.float32]

_STEPS = 64
_LARGEST = 255
_MOST = 1e6
_BEFORE = 2 * 255 * float(np.finfo(np.float32).eps)
"""See `Scale.noise`: two roundings to half of eps, in each of two results, of numbers up to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """Sums up differences over all values of all images, in levels. p999: the 99.9th percentile, to 1/64 of a level."""

    max: float
    mean: float
    p999: float


class Tally:
    """Gathers differences in constant memory.

    Examples:
        >>> tally = Tally()
        >>> tally.add(np.array([0, 0, 3, 1], np.uint8))
        >>> tally.result()
        Levels(max=3.0, mean=1.0, p999=3.0)
    """

    def __init__(self) -> None:
        self.images, self.differ = 0, 0
        """The number of images compared, and the number of those in which any value differs."""
        self._counts = np.zeros(_LARGEST * _STEPS + 1, np.int64)
        self._max, self._sum = 0.0, 0.0

    def add(self, levels: Differences) -> None:
        """Add the differences of one image's values, in any shape."""
        levels = levels.reshape(-1)
        self.images += 1
        self.differ += bool(levels.any())
        self._max = max(self._max, float(levels.max(initial=0)))
        self._sum += float(levels.sum(dtype=np.float64))
        if levels.dtype == np.uint8:
            self._counts[::_STEPS] += np.bincount(levels, minlength=_LARGEST + 1)
        else:
            steps = np.rint(levels * np.float32(_STEPS)).clip(max=len(self._counts) - 1).astype(np.int64)
            self._counts += np.bincount(steps, minlength=len(self._counts))

    def result(self) -> Levels | None:
        """Return the summary of all differences; None if no value was compared."""
        count = int(self._counts.sum())
        if count == 0:
            return None
        place = int(np.searchsorted(np.cumsum(self._counts), -(-999 * count // 1000)))
        return Levels(max=self._max, mean=self._sum / count, p999=min(place / _STEPS, self._max))


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Converts a program's results to levels: (value - black) / unit, where both are float64 [C, 1, 1].

    noise: the number of levels that rounding may add to a difference: of the result to its dtype, and before that of
        the level as a part of 255 and of its distance from the mean, to float32.
    """

    black: torch.Tensor
    unit: torch.Tensor
    noise: float

    @classmethod
    def of(cls, program: Program) -> Scale:
        """Compute the scale from what the last stage gives for black and white; from the whole program's results for a
        black and a white image if that stage has no table of results."""
        height, width, channels = program.result.shape
        assert height is not None and width is not None
        if program.result.dtype == "uint8":
            shape = channels, 1, 1
            black = torch.zeros(shape, dtype=torch.float64, device="cpu")
            return cls(black, black + 1, 0.0)
        last = program.pipeline.stages[-1]
        table = last.table() if isinstance(last, Pointwise) else None
        if table is not None:
            results = torch.from_numpy(table[:, [0, 255]])
            results = results.view(getattr(torch, program.result.dtype)) if table.dtype == np.uint16 else results
            return cls._between(results.double().T[..., None, None], program)
        side = 2 * max(height, width)
        samples = [cv2.imencode(".png", np.full((side, side, 3), level, np.uint8))[1] for level in (0, 255)]
        if isinstance(program.decoder, Preset):  # all presets give the same result for a plain image
            program = replace(program, decoder=replace(program.decoder, name="torchpipe_cpu"))
        images, faults = run_files(program, samples)
        for fault in faults:
            if fault is not None:  # by a stage that takes no image of this size or of one level
                raise GpuflowError(f"parity: a plain image of {side}x{side} pixels cannot be preprocessed: {fault}")
        return cls._between(images.double().flatten(2).median(dim=2).values[..., None, None], program)

    @classmethod
    def _between(cls, plain: torch.Tensor, program: Program) -> Scale:
        """Return the scale. plain: the results for black and for white, float64 [2, C, 1, 1]."""
        unit = (plain[1] - plain[0]) / 255
        unit = unit.where((unit != 0) & unit.isfinite(), 1.0)  # infinite where float16 cannot hold the results
        rounding = torch.finfo(getattr(torch, program.result.dtype)).eps
        largest = plain.abs().amax(dim=0).nan_to_num(posinf=0.0)
        return cls(plain[0], unit, float((largest / unit.abs()).max() * rounding) + _BEFORE)

    def levels(self, image: torch.Tensor) -> Bytes:
        """Convert a result [C, H, W] to an image for display: uint8 HWC, rounded to levels."""
        levels = (image.double().cpu() - self.black) / self.unit
        shown: Bytes = levels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
        return shown


def levels_apart(a: torch.Tensor, b: torch.Tensor, scale: Scale) -> Differences:
    """Return the difference of each value of two images [C, H, W] of the same shape and dtype, in levels.

    A value that is NaN or infinite in only one of them counts as 255 levels apart, and a million is the most.
    """
    if a.dtype == torch.uint8:
        return torch.where(a > b, a - b, b - a).numpy()
    levels = (differences(a, b) / scale.unit.abs()).nan_to_num(posinf=_LARGEST)
    return levels.clamp(max=_MOST).numpy().astype(np.float32)


def differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences of two tensors of one shape, float64.

    0 for equal values and for two NaN; infinite where only one value is NaN, or infinite.

    Examples:
        >>> nan = math.nan
        >>> differences(torch.tensor([1, nan, nan]), torch.tensor([3, nan, 0])).tolist()
        [2.0, 0.0, inf]
    """
    apart = (a.double() - b.double()).abs()
    return apart.where((a != b) & ~(a.isnan() & b.isnan()), 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
