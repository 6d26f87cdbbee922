"""The filters of local stages as values: how each pixel's neighbourhood is weighted, for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Filters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Separable filters of N uint8 images, and how the smoothed image is blended with the image.

    The smoothed level is the weighted sum in float32, rounded to the nearest level (a half to the even one). The result
    is level + (smoothed - level) * (1 - factor), clamped to 0-255 and truncated.

    rows [N, KY], columns [N, KX]: the weights of the rows above and below a pixel and of the columns beside it; KY and
        KX are odd. centre [N]: added to the pixel's own weight.
    factor [N]: 0 gives the smoothed image, 1 the image itself, and more a sharper one.
    active [N]: which samples are changed.
    border: what surrounds the image: `reflect`, the image mirrored without repeating its edge; `keep`: pixels whose
        neighbourhood leaves the image do not change.
    """

    rows: NDArray[np.float64]
    columns: NDArray[np.float64]
    centre: NDArray[np.float64]
    factor: NDArray[np.float64]
    active: NDArray[np.bool_]
    border: Literal["reflect", "keep"]
