"""color_jitter: changes brightness, contrast, saturation and hue by random factors, in random order for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Factor, Probability, Shift, range_of, with_probability

_NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
"""The adjustments, and the factor of each that changes nothing."""
_OPERATIONS = np.array([s.Operation[name.upper()] for name in _NEUTRAL])


@s.stage_class
class ColorJitter(s.Pointwise):
    """Jitter colours as torchvision's v2 ColorJitter does: clamp and truncate to uint8 after each adjustment.

    The adjustments run in a random order. Saturation and hue do not change gray images. Coefficients of a sample [9]:
    the indices of the four adjustments in the order in which they run, the factors of brightness, contrast, saturation
    and hue, and 1 or 0: whether the sample is changed.

    Args:
        brightness: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        contrast: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        saturation: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        hue: the shift is drawn from [-v, v] for a number v, or from [low, high], in turns of the colour circle.
        probability: the probability of changing an image.
    """

    stage_name = "color_jitter"
    tolerance = 1.0
    late_fields = ("probability",)
    other_names = ("RandomBrightnessContrast", "HueSaturationValue")

    brightness: Factor = 0.0
    contrast: Factor = 0.0
    saturation: Factor = 0.0
    hue: Shift = 0.0
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[ColorJitter, ...]:
        return (
            cls(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
            cls(brightness=(1.3, 1.3)),
            cls(brightness=0.8, saturation=(0.2, 1.8), probability=0.8),
            cls(brightness=(1.6, 1.6), contrast=(0.5, 0.5)),
        )

    @property
    def random(self) -> bool:
        """Return True also for two adjustments by fixed factors: the order in which they run is drawn."""
        varies, count = any(low != high for low, high in self._ranges()), sum(self._active())
        return self.probability > 0 and (varies or count > 1 or (self.probability < 1 and count > 0))

    def _ranges(self) -> list[tuple[float, float]]:
        return [range_of(getattr(self, name), neutral=neutral) for name, neutral in _NEUTRAL.items()]

    def _active(self) -> list[bool]:
        """Return which adjustments may change an image."""
        return [bounds != (neutral, neutral) for bounds, neutral in zip(self._ranges(), _NEUTRAL.values(), strict=True)]

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_rgb(self, spec)
        return spec

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        jitter = v2.ColorJitter(self.brightness, self.contrast, self.saturation, self.hue)
        return with_probability(jitter, self.probability)

    def draw(self, keys: s.StageKeys) -> Floats:
        numbers = keys.uniform(9)
        low, high = np.array(self._ranges()).T
        order, factors = numbers[:, :4].argsort(axis=1), low + numbers[:, 4:8] * (high - low)
        return np.concatenate([order, factors, numbers[:, 8:] < self.probability], axis=1)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        order, active = coefficients[:, :4].astype(int), np.array(self._active())
        kept, shape = active[order], (len(order), int(active.sum()))
        factors = np.take_along_axis(coefficients[:, 4:8], order, axis=1)
        codes = _OPERATIONS[order[kept]].reshape(shape)
        kinds = [s.Operation(code) for code in _OPERATIONS[active].tolist()]
        return s.Operations.of(
            np.where(coefficients[:, 8:] > 0, codes, int(s.Operation.NONE)),
            factors[kept].reshape(shape),
            kinds=kinds,
            statistics=sum(kind.needs_statistic for kind in kinds),
        )
