"""What tests of mixing share: random batches, mixtures with given numbers, and timm's and torchvision's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute.mixing import mix_images, mix_labels, soft_labels
from gpuflow.pipeline.stage import Mixing, Mixture

CLASSES = 7
Box = tuple[int, int, int, int]
"""y, x, height, width."""


def batch_of(
    count: int, *, size: tuple[int, int] = (13, 17), dtype: torch.dtype = torch.float32, nhwc: bool = False
) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Random images [N, 3, H, W] and labels [N]."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 3, *size, generator=generator)
    images = images.to(dtype) if dtype.is_floating_point else (images * 50 + 128).clamp(0, 255).to(dtype)
    images = images.contiguous(memory_format=torch.channels_last) if nhwc else images
    return images, np.random.default_rng(count).integers(0, CLASSES, count)


def mixture_of(
    partners: Sequence[int], weights: Sequence[float], boxes: Sequence[Box] | None = None, shares: Sequence[float] = ()
) -> Mixture:
    """Weights are rounded to float32, as drawn ones are."""
    rounded = np.array(weights, np.float32).astype(np.float64)
    return Mixture(
        partners=np.array(partners, np.int64),
        weights=rounded,
        boxes=np.array(boxes if boxes is not None else [(0, 0, 0, 0)] * len(partners), np.int64).reshape(-1, 4),
        shares=np.array(shares, np.float64) if len(shares) else rounded,
    )


def mixed(
    stage: Mixing, mixture: Mixture, images: torch.Tensor, labels: NDArray[np.int64]
) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """A mixed copy of a batch."""
    images = images.clone()
    mix_images(images, mixture)
    return images, mix_labels(soft_labels(labels, CLASSES), mixture, stage.label_smoothing)


def by_definition(images: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """A mixed copy of images, as the docstring of `Mixture` says."""
    result = images.clone()
    for i, partner in enumerate(mixture.partners.tolist()):
        if partner == i:
            continue
        weight, (y, x, height, width) = float(mixture.weights[i]), mixture.boxes[i].tolist()
        if weight != 1:
            result[i] = images[i] * weight + images[partner] * (1 - weight)
        result[i, :, y : y + height, x : x + width] = images[partner, :, y : y + height, x : x + width]
    return result


# --- references -------------------------------------------------------------------------------------------------------


def timm_box(height: int, width: int, lam: float, y: int, x: int) -> tuple[Box, float]:
    """timm.data.mixup's `rand_bbox` around pixel (y, x) and `cutmix_bbox_and_lam`, of timm 1.0."""
    ratio = np.sqrt(1 - lam)
    cut_h, cut_w = int(height * ratio), int(width * ratio)
    yl, yh = np.clip(y - cut_h // 2, 0, height), np.clip(y + (cut_h + 1) // 2, 0, height)
    xl, xh = np.clip(x - cut_w // 2, 0, width), np.clip(x + (cut_w + 1) // 2, 0, width)
    box = int(yl), int(xl), int(yh - yl), int(xh - xl)
    return box, float(1.0 - (yh - yl) * (xh - xl) / float(height * width))


def timm_target(
    labels: NDArray[np.int64], lam: float | torch.Tensor, smoothing: float, classes: int = CLASSES
) -> torch.Tensor:
    """timm.data.mixup's `mixup_target`."""
    off = smoothing / classes
    on = 1.0 - smoothing + off
    y1 = torch.full((len(labels), classes), off).scatter_(1, torch.from_numpy(labels).view(-1, 1), on)
    return y1 * lam + y1.flip(0) * (1.0 - lam)


def timm_batch(images: torch.Tensor, lam: float, box: Box | None) -> torch.Tensor:
    """timm.data.Mixup's `_mix_batch`."""
    x = images.clone()
    if box is not None:
        top, left, height, width = box
        rows, columns = slice(top, top + height), slice(left, left + width)
        x[:, :, rows, columns] = x.flip(0)[:, :, rows, columns]
    else:
        flipped = x.flip(0).mul_(1.0 - lam)
        x.mul_(lam).add_(flipped)
    return x


def timm_rows(images: torch.Tensor, lams: Sequence[float], boxes: Sequence[Box | None]) -> torch.Tensor:
    """timm.data.Mixup's `_mix_elem`, and `_mix_pair` where row i and its partner have the same parameters."""
    x, original = images.clone(), images
    for i, (lam, box) in enumerate(zip(lams, boxes, strict=True)):
        j = len(x) - 1 - i
        if box is not None:
            top, left, height, width = box
            rows, columns = slice(top, top + height), slice(left, left + width)
            x[i][:, rows, columns] = original[j][:, rows, columns]
        elif lam != 1:
            x[i] = x[i] * lam + original[j] * (1 - lam)
    return x


def torchvision_box(height: int, width: int, lam: float, y: int, x: int) -> tuple[Box, float]:
    """torchvision v2's `CutMix.make_params` around pixel (y, x)."""
    r = 0.5 * math.sqrt(1.0 - lam)
    half_w, half_h = int(r * width), int(r * height)
    x1, y1 = max(x - half_w, 0), max(y - half_h, 0)
    x2, y2 = min(x + half_w, width), min(y + half_h, height)
    return (y1, x1, y2 - y1, x2 - x1), float(1.0 - (x2 - x1) * (y2 - y1) / (width * height))
