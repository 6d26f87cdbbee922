"""color_jitter: changes brightness, contrast, saturation and hue by random factors, in random order for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.pipeline import stage as s

__all__ = ["ColorJitter"]

Factor = (
    Annotated[float, s.Bounds(least=0, words=">= 0 or [low, high]")]
    | Annotated[tuple[float, float], s.Bounds(least=0, ascending=True)]
)

_LEVELS = torch.arange(256, dtype=torch.uint8)
_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")
_OPERATIONS = np.array([s.Operation[name.upper()] for name in _ADJUSTMENTS])


@dataclass(frozen=True, kw_only=True, repr=False)
class ColorJitter(s.Pointwise):
    """Jitter colours as torchvision's v2 ColorJitter does: clamp and truncate to uint8 after each adjustment.

    The adjustments run in a random order. Saturation and hue do not change gray images. Coefficients of a sample [8]:
    the indices of the four adjustments in the order in which they run, then the factors of brightness, contrast,
    saturation and hue.

    Args:
        brightness: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        contrast: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        saturation: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        hue: the shift is drawn from [-v, v] for a number v, or from [low, high], in turns of the colour circle.
    """

    stage_name: ClassVar[str] = "color_jitter"
    tolerance: ClassVar[float] = 1.0

    brightness: Factor = 0.0
    contrast: Factor = 0.0
    saturation: Factor = 0.0
    hue: (
        Annotated[float, s.Bounds(least=0, most=0.5, words="within [0, 0.5] or [low, high]")]
        | Annotated[tuple[float, float], s.Bounds(least=-0.5, most=0.5, ascending=True)]
    ) = 0.0

    @classmethod
    def examples(cls) -> tuple[ColorJitter, ...]:
        return (
            cls(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
            cls(brightness=(1.3, 1.3)),
        )

    @property
    def random(self) -> bool:
        return any(low != high for low, high in self._ranges())

    def _ranges(self) -> list[tuple[float, float]]:
        ranges = []
        for name in _ADJUSTMENTS:
            value, centre = getattr(self, name), 0.0 if name == "hue" else 1.0
            if isinstance(value, tuple):
                ranges.append(value)
            else:
                ranges.append((centre - value if name == "hue" else max(centre - value, 0.0), centre + value))
        return ranges

    def _active(self) -> list[bool]:
        """Which adjustments may change an image."""
        return [not low == high == (0.0 if i == 3 else 1.0) for i, (low, high) in enumerate(self._ranges())]

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        if spec.color == "bgr":
            raise ValueError("weighs red, green and blue but gets bgr images; decode with color: rgb")
        return spec

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.ColorJitter(self.brightness, self.contrast, self.saturation, self.hue)

    def draw(self, keys: s.StageKeys) -> NDArray[np.float64]:
        numbers = keys.uniform(8)
        low, high = np.array(self._ranges()).T
        return np.concatenate([numbers[:, :4].argsort(axis=1), low + numbers[:, 4:] * (high - low)], axis=1)

    def apply(self, image: NDArray[Any], coefficients: NDArray[np.float64], out: NDArray[Any] | None) -> NDArray[Any]:
        planes = torch.from_numpy(np.stack(cv2.split(image)))
        factors, active = coefficients[4:].tolist(), self._active()
        for index in coefficients[:4].astype(int).tolist():
            if active[index]:
                planes = _ADJUST[index](planes, factors[index])
        result = cv2.merge(list(planes.numpy()), dst=out)
        return result.reshape(image.shape)

    def device_operations(self, coefficients: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        order, active = coefficients[:, :4].astype(int), np.array(self._active())
        kept, shape = active[order], (len(order), int(active.sum()))
        factors = np.take_along_axis(coefficients[:, 4:], order, axis=1)
        return _OPERATIONS[order[kept]].reshape(shape), factors[kept].reshape(shape)


def _luma(planes: torch.Tensor) -> torch.Tensor:
    """Rec. 601 luma rounded down, float32 [1, H, W]."""
    if len(planes) == 1:
        return planes.to(torch.float32)
    r, g, b = planes
    luma: torch.Tensor = r.mul(0.2989).add_(g, alpha=0.587).add_(b, alpha=0.114)
    return luma.floor_()[None]


def _lookup(planes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    table = table.clamp_(0, 255).to(torch.uint8)
    return torch.from_numpy(cv2.LUT(planes.numpy().reshape(-1, planes.shape[-1]), table.numpy())).view(planes.shape)


def _brightness(planes: torch.Tensor, factor: float) -> torch.Tensor:
    return _lookup(planes, _LEVELS.mul(factor))


def _contrast(planes: torch.Tensor, factor: float) -> torch.Tensor:
    return _lookup(planes, _LEVELS.mul(factor).add_(_luma(planes).mean(), alpha=1.0 - factor))


def _saturation(planes: torch.Tensor, factor: float) -> torch.Tensor:
    if len(planes) == 1:
        return planes
    blend: torch.Tensor = planes.mul(factor).add_(_luma(planes), alpha=1.0 - factor)
    blend.clamp_(0, 255)
    return blend.to(torch.uint8)


def _hue(planes: torch.Tensor, shift: float) -> torch.Tensor:
    from torchvision.transforms.v2.functional import adjust_hue_image

    return adjust_hue_image(planes, shift)  # type: ignore[no-any-return]


_ADJUST = (_brightness, _contrast, _saturation, _hue)
