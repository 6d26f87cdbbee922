"""Runs a local stage's filters on one image on the CPU: the reference for the GPU's kernel."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.pipeline.local import Filters

__all__ = ["run_filters"]

_BORDERS = {"reflect": cv2.BORDER_REFLECT_101, "keep": cv2.BORDER_REPLICATE}


def run_filters(image: NDArray[np.uint8], filters: Filters, i: int) -> NDArray[np.uint8]:
    """Sample i's result for its image [H, W, C], which is not changed."""
    if not filters.active[i]:
        return image
    rows, columns = filters.rows[i].astype(np.float32), filters.columns[i].astype(np.float32)
    summed = cv2.sepFilter2D(image, cv2.CV_32F, columns, rows, borderType=_BORDERS[filters.border])
    smoothed: NDArray[np.float32] = np.rint(summed.reshape(image.shape) + image * np.float32(filters.centre[i]))
    if filters.factor[i] != 0:
        levels = image.astype(np.float32)
        share = np.float32(1.0 - filters.factor[i])
        exact = (smoothed - levels).astype(np.float64) * share + levels  # rounded once, as a fused multiply-add is
        smoothed = np.asarray(exact, np.float32)
    result = np.clip(smoothed, 0, 255, out=smoothed).astype(np.uint8)
    if filters.border == "keep":
        high, wide = len(rows) // 2, len(columns) // 2
        inside = slice(high, max(image.shape[0] - high, high)), slice(wide, max(image.shape[1] - wide, wide))
        kept = image.copy()
        kept[inside] = result[inside]
        return kept
    return result
