"""Filters of each pixel's neighbourhood by OpenCV and numpy."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.pipeline.pointwise import Filters

__all__ = ["filtered"]


def filtered(image: NDArray[np.uint8], filters: Filters) -> NDArray[np.uint8]:
    """Return sample 0's image [H, W, C] after its filters."""
    if not filters.active[0]:
        return image
    image = np.ascontiguousarray(image)
    border = {"reflect": cv2.BORDER_REFLECT_101, "keep": cv2.BORDER_REPLICATE}[filters.border]
    rows, columns = filters.rows[0].astype(np.float32), filters.columns[0].astype(np.float32)
    summed = cv2.sepFilter2D(image, cv2.CV_32F, columns, rows, borderType=border).reshape(image.shape)
    smoothed = np.rint(summed + image * np.float32(filters.centre[0]))
    if filters.factor[0] != 0:
        share = np.float32(1.0 - filters.factor[0])
        blended = (smoothed - image).astype(np.float64) * share + image  # rounded once, as a fused multiply-add is
        smoothed = blended.astype(np.float32)
    result = np.clip(smoothed, 0, 255).astype(np.uint8)
    if filters.border == "keep":
        (height, width), high, wide = image.shape[:2], len(rows) // 2, len(columns) // 2
        y, x = np.ogrid[:height, :width]
        inside = (y >= high) & (y < height - high) & (x >= wide) & (x < width - wide)
        return np.where(inside[..., None], result, image)
    return result
