"""gaussian_blur: smooths an image with a Gaussian of random width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Floats
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import DrawnFactor, Probability, size_pair, with_probability


@s.stage_class
class GaussianBlur(DrawnFactor, s.Local):
    """Blur an image, as torchvision's GaussianBlur does: mirrored at its border, rounded to the nearest level.

    torchvision sums the neighbourhood in two dimensions, the CPU and the GPU here rows and columns one after the other,
    each in its own order: a sum in float32 that lies close to a half may be rounded to either level. So all of them
    agree within one level. Images that are smaller than the kernel, which torchvision refuses, are mirrored repeatedly.

    Args:
        kernel_size: rows and columns of the neighbourhood, an odd number of pixels; or [columns, rows].
        sigma: the standard deviation in pixels, or the range [low, high] that it is drawn from.
        probability: the probability of changing an image.

    Examples:
        >>> GaussianBlur(kernel_size=3, sigma=1.0).filters(np.array([[1.0, 1.0]])).columns.round(2).tolist()
        [[0.27, 0.45, 0.27]]
    """

    stage_name = "gaussian_blur"
    tolerance = 1.0
    neutral = 0.0
    other_keys = {"blur_limit": "kernel_size", "sigma_limit": "sigma"}

    kernel_size: Annotated[int | tuple[int, int], s.Bounds(least=1, limit=1023)]
    sigma: (
        Annotated[float, s.Bounds(above=0, limit=1000)]
        | Annotated[tuple[float, float], s.Bounds(above=0, limit=1000, ascending=True)]
    ) = (0.1, 2.0)
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[GaussianBlur, ...]:
        return (
            cls(kernel_size=9),
            cls(kernel_size=5, sigma=(0.5, 1.5)),
            cls(kernel_size=3, sigma=1, probability=0.5),
            cls(kernel_size=(3, 7)),
        )

    def faults(self) -> Iterator[tuple[Any, ...]]:
        if any(side % 2 == 0 for side in size_pair(self.kernel_size)):
            yield "kernel_size", "must be odd", self.kernel_size

    @property
    def bounds(self) -> tuple[float, float]:
        return self.sigma if isinstance(self.sigma, tuple) else (self.sigma, self.sigma)

    @property
    def random(self) -> bool:
        return max(size_pair(self.kernel_size)) > 1 and super().random

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return with_probability(v2.GaussianBlur(size_pair(self.kernel_size), self.sigma), self.probability)

    def filters(self, coefficients: Floats) -> s.Filters:
        of_columns, of_rows = size_pair(self.kernel_size)
        columns = _weights(of_columns, coefficients[:, 1:2])
        rows = columns if of_rows == of_columns else _weights(of_rows, coefficients[:, 1:2])
        zeros = np.zeros(len(coefficients))
        return s.Filters(
            rows=rows,
            columns=columns,
            centre=zeros,
            factor=zeros,
            active=coefficients[:, 0] > 0,
            border="reflect",
        )


def _weights(count: int, sigma: Floats) -> Floats:
    """Return the weights of neighbours along one side, [N, count], for sigmas [N, 1]."""
    half = (count - 1) / 2
    with np.errstate(over="ignore"):  # of a tiny sigma: only the pixel itself has a weight then
        weights: Floats = np.exp(-0.5 * (np.linspace(-half, half, count) / sigma) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights
