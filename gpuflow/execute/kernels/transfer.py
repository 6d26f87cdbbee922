"""Copies what is drawn per sample to the device of the images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute import packing

__all__ = ["send"]


def send(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Queue copies of the arrays on the current stream, by one transfer: tensors of their dtypes and shapes."""
    starts, size = packing.layout(arrays)
    block = np.empty(size, np.uint8)
    packing.write(block, starts, arrays)
    sent = torch.from_numpy(block)
    if device.type == "cuda":  # torch keeps pinned memory until copies from it have ended
        sent = sent.pin_memory().to(device, non_blocking=True)
    return packing.tensors_in(sent, starts, arrays)
