"""iou_crop: crops a random box that overlaps an object by at least a drawn IoU (SSD's crop)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Ratio, of_size

_ROUNDS = 50
"""The most overlaps that are drawn for an image; it stays as it is if no box has been found then."""


@s.stage_class
class IouCrop(s.Geometry):
    """Crop a random box that holds the centre of an object and overlaps it, as torchvision's RandomIoUCrop does.

    A least overlap is drawn, and up to `trials` boxes: the first is cropped in which an object with its centre inside
    has this IoU. Without such a box, another overlap is drawn. Objects whose centre is outside of the crop are dropped.
    An image without objects stays as it is.

    Args:
        scale: the box's height, and its width, as fractions of the image's are drawn from [low, high].
        ratio: the allowed width of the box divided by its height, [low, high].
        overlaps: the least overlaps, each drawn as often; one of 1 leaves the image as it is.
        trials: the number of boxes that are drawn for an overlap.
        boxes: the name of the source's field that has the objects.
    """

    stage_name = "iou_crop"
    other_names = ("RandomIoUCrop", "RandomSizedBBoxSafeCrop")
    random = True
    other_keys = {"sampler_options": "overlaps"}

    scale: Annotated[tuple[float, float], s.Bounds(above=0, most=1, ascending=True)] = (0.3, 1.0)
    ratio: Ratio = (0.5, 2.0)
    overlaps: Annotated[tuple[float, ...], s.Bounds(least=0, limit=1000)] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    trials: Annotated[int, s.Bounds(least=1, limit=1000)] = 40
    boxes: str = "boxes"

    @classmethod
    def examples(cls) -> tuple[IouCrop, ...]:
        return (cls(), cls(scale=(0.4, 0.9), ratio=(0.8, 1.5), overlaps=(0.0, 0.2), trials=20, boxes="objects"))

    def faults(self) -> Iterator[tuple[str, str]]:
        if not self.overlaps:
            yield "overlaps", "must name at least one overlap, got []"

    @property
    def record_values(self) -> Mapping[str, s.RecordValue]:
        return {"boxes": s.RecordValue(self.boxes, "boxes")}

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return of_size(super().output(spec), None, None)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomIoUCrop(*self.scale, *self.ratio, list(self.overlaps), self.trials)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        boxes, count = keys.values[self.record_values["boxes"]], 1 + 4 * self.trials
        crop = np.array([np.zeros_like(height), np.zeros_like(width), height, width])
        cropped = np.zeros(len(height), bool)
        left = np.arange(len(height))
        for turn in range(_ROUNDS if boxes.any() else 0):
            some = replace(keys, positions=keys.positions[left])
            numbers = some.uniform((turn + 1) * count)[:, turn * count :]
            least = np.array(self.overlaps)[(numbers[:, 0] * len(self.overlaps)).astype(np.int64)]
            tried = numbers[:, 1:].reshape(-1, self.trials, 4)
            found, fits = self._tried(tried, least, boxes[left], height[left], width[left])
            fits &= least < 1
            crop[:, left[fits]], cropped[left[fits]] = found[:, fits], True
            if not len(left := left[~fits & (least < 1)]):
                break
        y, x, height, width = crop
        return (s.Crop(y, x, height, width, centers=cropped),)

    def _tried(self, numbers: Floats, least: Floats, boxes: Floats, height: Ints, width: Ints) -> tuple[Ints, Bools]:
        """Return the first box that fits of those that `numbers` [N, trials, 4] give: y, x, height, width, [4, N].

        And whether there is one, [N]. least [N]: the overlaps. boxes [N, K, 4]: the objects; others have no area.
        """
        sides = self.scale[0] + numbers[..., :2] * (self.scale[1] - self.scale[0])
        size = np.stack([width, height], axis=1)[:, None]  # of the image, [N, 1, 2]: x and y, as below
        sides = (size * sides).astype(np.int64)
        start = ((size - sides) * numbers[..., 2:]).astype(np.int64)
        ratio = sides[..., 0] / np.maximum(sides[..., 1], 1)
        fits = sides.all(axis=2) & (ratio >= self.ratio[0]) & (ratio <= self.ratio[1])
        low, high = boxes[:, None, :, :2], boxes[:, None, :, 2:]
        first, last = start[:, :, None], (start + sides)[:, :, None]
        inside = ((first < (low + high) / 2) & ((low + high) / 2 < last)).all(axis=3)
        shared = np.maximum(np.minimum(high, last) - np.maximum(low, first), 0).prod(axis=3)
        area = (high - low).prod(axis=3)
        overlap = shared / (area + sides.prod(axis=2)[..., None] - shared + (area == 0))
        fits &= (inside & (area > 0) & (overlap >= least[:, None, None])).any(axis=2)
        rows, chosen = np.arange(len(least)), fits.argmax(axis=1)
        found = np.concatenate([start, sides], axis=2)[rows, chosen].T[[1, 0, 3, 2]]
        return found, fits[rows, chosen]
