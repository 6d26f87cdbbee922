"""Measures on a test picture how far a stage is from the foreign transform that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.decode import self_test
from gpuflow.errors import reason_of

__all__ = ["apart", "picture"]

_HEIGHT, _WIDTH = 361, 480


@cache
def picture() -> NDArray[np.uint8]:
    """An RGB picture with waves, an edge and some noise: uint8 [361, 480, 3]."""
    large = cv2.resize(self_test.pixels("rgb"), (_WIDTH, _HEIGHT), interpolation=cv2.INTER_CUBIC)
    noise = np.random.default_rng(0).normal(0, 12, large.shape)
    shown: NDArray[np.uint8] = np.clip(large + noise, 0, 255).astype(np.uint8)
    shown.flags.writeable = False
    return shown


def apart(transform: Callable[[Any], Any], stage: Callable[[Any], Any]) -> str:
    """How far two transforms of a PIL image are apart on the test picture, in words.

    Args:
        transform: of another library, which may do anything, fail included.
        stage: what stands for it.
    """
    from PIL import Image

    try:
        wanted, again, found = (_levels(run(Image.fromarray(picture()))) for run in (transform, transform, stage))
    except Exception as error:  # a user's code may raise anything
        return f"not measured: on a test picture it raises {reason_of(error, with_type=True)}"
    if wanted.shape != again.shape or (wanted != again).any():
        return "not measured: it draws random numbers"
    if wanted.shape != found.shape:
        sizes = " and ".join("x".join(map(str, image.shape)) for image in (wanted, found))
        return f"which gives another shape on a test picture: {sizes}"
    levels = np.abs(wanted - found)
    if not levels.any():
        return "0 levels apart on a test picture"
    return f"up to {levels.max():.0f} levels apart on a test picture, {levels.mean():.2f} on average"


def _levels(image: Any) -> NDArray[np.float64]:
    """A PIL image, an array or a tensor [C, H, W] as levels [H, W, C]; floats are taken as 0 to 1."""
    import torch

    if isinstance(image, torch.Tensor):
        image = image.detach().permute(1, 2, 0) if image.ndim == 3 else image
        scale = 255 if image.is_floating_point() else 1
        return np.asarray(image.double().numpy() * scale)
    return np.asarray(image, np.float64)
