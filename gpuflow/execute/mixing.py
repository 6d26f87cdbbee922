"""Mixes the images and labels of a finished batch as a `Mixture` says: labels on the CPU, images there or on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.arrays import Ints
from gpuflow.pipeline.stage import Mixture


def soft_labels(labels: Ints, classes: int) -> NDArray[np.float32]:
    """Return class labels [N] as probabilities of the classes, [N, classes].

    Examples:
        >>> soft_labels(np.array([2, 0]), classes=3).tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    probabilities = np.zeros((len(labels), classes), np.float32)
    probabilities[np.arange(len(labels)), labels] = 1
    return probabilities


def mix_labels(probabilities: NDArray[np.float32], mixture: Mixture, label_smoothing: float) -> NDArray[np.float32]:
    """Smooth probabilities of classes [N, classes], then mix each row with its partner's."""
    classes = probabilities.shape[1]
    kept, spread = np.float32(1 - label_smoothing), np.float32(label_smoothing / classes)
    smooth = probabilities * kept + spread
    own, other = (share.astype(np.float32)[:, None] for share in (mixture.shares, 1 - mixture.shares))
    mixed: NDArray[np.float32] = smooth * own + smooth[mixture.partners] * other
    return mixed


def mix_images(images: torch.Tensor, mixture: Mixture) -> None:
    """Mix images [N, C, H, W] on the CPU in place, one after the other.

    Partners are processed one after the other, so that only a few original images are copied at a time and are still
    in the processor's cache.
    """
    partners, weights, boxes = mixture.partners.tolist(), mixture.weights.tolist(), mixture.boxes.tolist()
    rows = sorted(np.flatnonzero(mixture.changed).tolist(), key=lambda row: (min(row, partners[row]), row))
    readers = Counter(partners[row] for row in rows)
    originals: dict[int, torch.Tensor] = {}
    for row in rows:
        image, partner = images[row], partners[row]
        if readers[row]:
            originals[row] = image.clone()
        other = originals[partner] if partner in originals else images[partner]
        if weights[row] != 1:
            image.mul_(weights[row]).add_(other.mul(1 - weights[row]))
        y, x, height, width = boxes[row]
        image[:, y : y + height, x : x + width] = other[:, y : y + height, x : x + width]
        readers[partner] -= 1
        if not readers[partner]:
            originals.pop(partner, None)


def arrays_of(mixture: Mixture) -> tuple[NDArray[np.generic], ...]:
    """Return what else `mix_images_at_once` takes, as small arrays that can be sent to a device."""
    weights = mixture.weights.astype(np.float32), (1 - mixture.weights).astype(np.float32)
    return (mixture.partners, *weights, mixture.boxes)


def mix_images_at_once(images: torch.Tensor, sent: Sequence[torch.Tensor], *, blends: bool) -> None:
    """Mix images on any device as `mix_images` does, by a number of operators that does not depend on the batch.

    It needs the memory of a second batch while it runs. Images must be finite where they are blended.

    Args:
        images: [N, C, H, W], contiguous or channels_last.
        sent: `arrays_of` the mixture, on the same device.
        blends: whether any weight is not 1.
    """
    partners, own, other, boxes = sent
    planar = images.is_contiguous()
    memory = images if planar else images.permute(0, 2, 3, 1)
    partner = memory.index_select(0, partners)
    top, left, height, width = boxes.unsqueeze(-1).unbind(1)
    y, x = (torch.arange(size, device=images.device) for size in images.shape[2:])
    inside = ((y >= top) & (y < top + height))[:, :, None] & ((x >= left) & (x < left + width))[:, None, :]
    torch.where(inside.unsqueeze(1 if planar else 3), partner, memory, out=memory)
    if blends:
        share = (-1, 1, 1, 1)
        memory.mul_(own.view(share)).add_(partner.mul_(other.view(share)).masked_fill_((other == 0).view(share), 0))
