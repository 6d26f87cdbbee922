"""Masks of instances as pixels."""

from __future__ import annotations

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.execute.cpu.masks import Instance, draw_instance

__all__ = ["instance_mask"]


def instance_mask(mask: Instance, size: tuple[int, int]) -> Bytes:
    """Return the pixels of one instance, 0 or 1, uint8 [height, width]."""
    down = np.zeros(size[::-1], np.uint8)
    draw_instance(mask, 0, down)
    return down.T
