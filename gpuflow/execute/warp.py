"""Names borders and roundings of warps by projective maps, for native/warp.c and the GPU's kernel, which follows it.

A result is at most one level from the exact one. `bilinear` computes as OpenCV 5 does, in float32, where coordinates
are small enough for that; otherwise coordinates are computed in float64 and weights in float32. With a constant border,
`bilinear` blends at the edge as torchvision does: mask * (sum - fill) + fill, where `sum` adds the weighted pixels
inside the image and `mask` their weights. With the other borders, pixels outside are looked up inside. A map that only
mirrors and shifts whole pixels copies them.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Floats

TIE = 2.0**-20
"""A nearest pixel whose edge is less than this away is the next one, so that rounding errors do not choose."""
PLACES = 2.0**11
"""Bilinear places are multiples of 1 / PLACES of a pixel."""
TINY = 1e-12
"""The third coordinate of a point is at least this large, so that a point at the horizon has coordinates."""
BORDERS = {"constant": 0, "edge": 1, "reflect": 2, "symmetric": 3}
"""What native code and kernels call each border."""
OPENCV_BORDERS = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}
"""What OpenCV calls each border."""


def float32_map(matrix: Floats, height: Any, width: Any) -> NDArray[np.float32]:
    """Return affine maps [..., 3, 3] as torchvision has them in float32, [..., 2, 3].

    They are about the center of images of these sizes, in units of half their sides.
    """
    found = np.empty((*matrix.shape[:-2], 2, 3), np.float32)
    for i, side in enumerate((width, height)):
        across, down = matrix[..., i, 0], matrix[..., i, 1]
        found[..., i, 0], found[..., i, 1] = across, down
        found[..., i, 2] = matrix[..., i, 2] + (across * width + down * height - side) / 2
        found[..., i, :] /= np.asarray(side / 2, np.float32)[..., None]
    return found
