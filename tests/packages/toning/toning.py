"""A package that brings stages of its own, as pip would install it next to gpuflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpuflow.spec import Bounds, ImageSpec, Operations, Pointwise, StageKeys, require_pixels

__all__ = ["MaskBlue", "Tone"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Tone(Pointwise):
    """Raise levels to a power that is drawn for each sample, another one for each channel, then mix channels.

    Args:
        power: the range of the power.
    """

    stage_name: ClassVar[str] = "tone"

    power: Annotated[tuple[float, float], Bounds(above=0, ascending=True)] = (0.5, 2.0)

    @property
    def random(self) -> bool:
        return True

    def output(self, spec: ImageSpec) -> ImageSpec:
        require_pixels(self, spec)
        return spec

    def draw(self, keys: StageKeys) -> NDArray[np.float64]:
        low, high = self.power
        return low + keys.uniform(4) * (high - low)

    def operations(self, coefficients: NDArray[np.float64], height: Any, width: Any) -> Operations:
        count = len(coefficients)
        curves = (np.arange(256) / 255) ** coefficients[:, :3, None] * 255
        matrices = np.zeros((count, 3, 4))
        matrices[:, range(3), range(3)] = 0.9
        matrices[:, range(3), (1, 2, 0)] = 0.1 * coefficients[:, 3:]
        every = np.ones(count, bool)
        parts = Operations.table(every, np.rint(curves).astype(np.uint8)), Operations.matrix(every, matrices)
        return Operations.join(count, parts)


@dataclass(frozen=True, kw_only=True, repr=False)
class MaskBlue(Pointwise):
    """Set the last channel to 0. It has no form but that for the CPU."""

    stage_name: ClassVar[str] = "mask_blue"

    def output(self, spec: ImageSpec) -> ImageSpec:
        require_pixels(self, spec)
        return spec

    def apply(self, image: NDArray[Any], coefficients: NDArray[np.float64], out: NDArray[Any] | None) -> NDArray[Any]:
        masked = np.copy(image) if out is None else out
        np.copyto(masked, image)
        masked[..., -1] = 0
        return masked
