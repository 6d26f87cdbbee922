"""rand_augment: applies a few operations, drawn for each sample, at one magnitude (RandAugment)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np

from gpuflow.errors import Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, Probability, WarpInterpolation
from gpuflow.stages.policy_parts import (
    LISTED,
    MAGNITUDES,
    OPERATIONS,
    AugmentPolicy,
    Choice,
    MagnitudeTable,
    uniform_places,
)
from gpuflow.stages.timm_parts import SPACES, Space, choice_at, ordered_by_weight

_SPACES = {"torchvision": Space(LISTED, MAGNITUDES), **SPACES}


@s.stage_class
class RandAugment(AugmentPolicy):
    """Apply operations that are drawn for each sample, as RandAugment of torchvision or timm does.

    Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2019.

    With `interpolation: nearest`, all pixels are those of torchvision on a GPU, on every device. Where a point lies
    exactly between two pixels, torchvision's rounding errors in float32 choose one of them. Shears have whole rows or
    columns of such points, at 4 of 31 magnitudes. Torchvision itself may take others of these pixels on a processor
    that adds up float32 products in another way than GPUs and Intel's processors do, such as one of AMD.

    timm's string `rand-m9-n2-mstd0.5-inc1` is `{space: timm_increasing, magnitude: 9, noise: 0.5, probability: 0.5,
    interpolation: bilinear, fill: [124, 116, 104]}`. Where a warp shows the outside of an image, timm fills whole
    pixels, and this stage blends those at the edge. Its Gaussian blur is exact; Pillow's, which timm uses, is near it.

    Args:
        operations: how many operations a sample gets, one after the other.
        magnitude: the number of the bin that all magnitudes are taken from, from 0; with timm's operations the level,
            0 to 10.
        bins: into how many bins the range of each magnitude is divided; with timm's operations always 11.
        space: the operations and the ranges of their magnitudes: those of `torchvision`; `timm`, or `timm_increasing`,
            whose levels all change an image more the higher they are (`inc1`); or timm's lists `weights`, `3a` and
            `3aw`, of increasing operations. A list with weights, `weights` or `3aw`, is drawn without repetition.
        noise: the standard deviation of a sample's level (timm's `mstd`); `uniform`: drawn from 0 to `magnitude`.
        limit: the highest level, with noise or without (`mmax`).
        probability: of each operation (`p`, which is 0.5 in timm).
        interpolation: how pixels are resampled.
        fill: the level outside the image, or [red, green, blue].
    """

    stage_name = "rand_augment"
    late_fields = ("space", "noise", "limit", "probability")
    other_keys = {"num_ops": "operations", "num_magnitude_bins": "bins", "magnitude_std": "noise"}

    operations: Annotated[int, s.Bounds(least=1, limit=16)] = 2
    magnitude: Annotated[int, s.Bounds(least=0, limit=999)] = 9
    bins: Annotated[int, s.Bounds(least=2, limit=1000)] = 31
    interpolation: WarpInterpolation = "nearest"
    fill: Fill = 0
    space: Literal["torchvision", "timm", "timm_increasing", "timm_weights", "timm_3a", "timm_3aw"] = "torchvision"
    noise: Literal["uniform"] | Annotated[float, s.Bounds(least=0, limit=1000)] = 0.0
    limit: Annotated[int, s.Bounds(least=1, limit=1000)] = 10
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[RandAugment, ...]:
        timm: dict[str, Any] = {"probability": 0.5, "interpolation": "bilinear"}
        return (
            cls(),
            cls(operations=1, magnitude=20, bins=25, interpolation="bilinear", fill=(9, 99, 199)),
            cls(space="timm_increasing", noise=0.5, **timm),
            cls(space="timm", noise="uniform", limit=8, **timm),
            cls(space="timm_3aw", operations=3, noise=2.0, **timm),
        )

    def faults(self) -> Iterator[Problem]:
        if self.space == "torchvision":
            if self.magnitude >= self.bins:
                rule = f"must be less than bins = {self.bins}"
                yield Problem.of("magnitude", rule, self.magnitude, code="config.conflict")
            for name in self.late_fields[1:]:
                if (value := getattr(self, name)) != getattr(type(self), name):
                    rule, action = "is only of timm's operations", "set space: timm"
                    yield Problem.of(name, rule, value, action, code="config.conflict")
            return
        if self.bins != type(self).bins:
            rule = "is only of torchvision's operations: timm's have levels from 0 to 10"
            yield Problem.of("bins", rule, self.bins, "leave it out", code="config.conflict")
        if self._space.weights and self.operations > (most := len(self._space.names)):
            rule = f"must be at most {most}, because {self.space} is drawn without repetition"
            yield Problem.of("operations", rule, self.operations, code="config.conflict")

    @property
    def _space(self) -> Space:
        return _SPACES[self.space]

    @property
    def rounds(self) -> int:
        return self.operations

    @property
    def timm_names(self) -> tuple[str, ...]:
        return () if self.space == "torchvision" else self._space.names

    @property
    def magnitudes(self) -> MagnitudeTable:
        return self._space.magnitudes

    def choose(self, keys: s.StageKeys, turn: int) -> Choice:
        if self.space != "torchvision":
            return self._choose_timm(keys, turn)
        numbers = keys.uniform(2 * (turn + 1))[:, 2 * turn :]
        operation = uniform_places(numbers[:, 0], len(LISTED))
        return Choice(operation, np.full_like(operation, self.magnitude), numbers[:, 1] < 0.5, self.bins)

    def _choose_timm(self, keys: s.StageKeys, turn: int) -> Choice:
        """Return the operations of round `turn` at noisy levels; some samples get none."""
        space = self._space
        ordering, start = len(space.weights), len(space.weights) + 5 * turn
        drawn = keys.uniform(start + 5)
        numbers = drawn[:, start:]
        if ordering:
            place = ordered_by_weight(drawn[:, :ordering], space.weights, turn)
        else:
            place = uniform_places(numbers[:, 0], len(space.names))
        operation = np.array([OPERATIONS.index(name) for name in space.names])[place]
        operation[numbers[:, 1] >= self.probability] = OPERATIONS.index("Identity")
        return choice_at(operation, self.magnitude, self.noise, self.limit, numbers[:, 2:])

    def torchvision(self) -> Any:
        numbers = {"num_ops": self.operations, "magnitude": self.magnitude, "num_magnitude_bins": self.bins}
        return self.transform("RandAugment", **numbers)
