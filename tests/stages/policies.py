"""What the tests of policies share: one operation of a policy next to torchvision's, and a draw next to a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import _geometry

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, WarpInterpolation
from gpuflow.stages import CenterCrop, Decode
from gpuflow.stages.policy_parts import OPERATIONS, AugmentPolicy, Drawn, Range
from tests.images import photo, png
from tests.running import decoded, images, keys_of, program_of
from tests.stages.warps import ties_of

__all__ = ["FEW", "Fixed", "by_torchvision", "check_draws", "check_magnitudes", "check_nearest", "frequencies"]

FEW = 1e-3
"""The largest share of pixels that may differ: those of nearest warps whose place is between two pixels."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Fixed(AugmentPolicy):
    """The same operation for every sample."""

    stage_name: ClassVar[str] = "fixed"

    name: str
    magnitude: float = 0.0
    interpolation: WarpInterpolation = "nearest"
    fill: Fill = 0

    @property
    def rounds(self) -> int:
        return 1

    def drawn(self, keys: s.StageKeys, turn: int) -> Drawn:
        count = len(keys.positions)
        return Drawn(np.full(count, OPERATIONS.index(self.name)), np.full(count, self.magnitude))

    def drawn_for(self, keys: s.StageKeys, turn: int, height: Ints, width: Ints) -> Drawn:
        return self.drawn(keys, turn)


def by_torchvision(image: torch.Tensor, name: str, magnitude: float, interpolation: str, fill: Any) -> torch.Tensor:
    """torchvision's operation of its policies on one image [C, H, W]."""
    mode = InterpolationMode(interpolation)
    policy = v2.RandAugment(interpolation=mode, fill=list(fill) if isinstance(fill, tuple) else fill)
    result: torch.Tensor = policy._apply_image_or_video_transform(image, name, magnitude, mode, policy._fill)
    return result


def check_magnitudes(ranges: dict[str, Range], torchvision: Any, bins: int) -> None:
    """That the magnitudes of each operation are torchvision's, for images of several sizes."""
    for name, (function, both_signs) in torchvision.items():
        ours = ranges.get(name)
        for height, width in ((224, 224), (97, 331), (1, 500)):
            theirs = function(bins, height, width)
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                side = {"": 1, "height": height, "width": width}[ours.of]
                assert ours.bins(bins, side).tolist() == theirs.double().tolist(), name
                assert ours.both_signs == both_signs, name


def fused_grid(theta: torch.Tensor, w: int, h: int, ow: int, oh: int) -> torch.Tensor:
    """torchvision's `_affine_grid` as GPUs and Intel's processors compute it: each term of a float32 product is
    multiplied and added at once. The product of others, such as AMD's, may be rounded before it is added."""
    x = torch.arange(ow, dtype=torch.float64) + (1.0 - ow) * 0.5
    y = torch.arange(oh, dtype=torch.float64)[:, None] + (1.0 - oh) * 0.5
    numbers = (theta[0].T / torch.tensor([0.5 * w, 0.5 * h])).double()
    sides = []
    for axis in (0, 1):
        total = (x * numbers[0, axis]).float().double().expand(oh, ow)
        total = (y * numbers[1, axis] + total).float().double()
        sides.append((total + numbers[2, axis]).float())
    return torch.stack(sides, dim=-1)[None]


def check_nearest(ranges: dict[str, Range], bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That all nearest pixels are torchvision's, for every bin, also where the points of whole rows lie between two.

    If this processor rounds otherwise than a GPU, few pixels are others here, none of them away from such points.
    """
    height, width = 224, 250
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data, size = png(pixels), CenterCrop(size=(height, width))
    for name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"):
        side = {"": 1, "height": height, "width": width}[ranges[name].of]
        for place, magnitude in enumerate(ranges[name].bins(bins, side).tolist()):
            magnitude *= 1 if place % 2 else -1
            stage = Fixed(name=name, magnitude=magnitude, fill=9)
            (found,) = images(program_of(Decode(), stage, size), [data])
            with monkeypatch.context() as patch:
                patch.setattr(_geometry, "_affine_grid", fused_grid)
                expected = by_torchvision(decoded(data), name, magnitude, "nearest", 9)
            assert torch.equal(found, expected), (name, place)
            here = (found != by_torchvision(decoded(data), name, magnitude, "nearest", 9)).any(dim=0).numpy()
            assert here.mean() < 0.02, (name, place)
            if here.any():
                (move,) = stage.parts()[0].draw(keys_of(1).stage("fixed", 0), np.array([height]), np.array([width]))  # type: ignore[attr-defined]
                assert not here[~ties_of(move.matrix[0], (height, width))].any(), (name, place)


def check_draws(policy: AugmentPolicy, count: int = 48) -> None:
    """That what a policy draws for each sample is what torchvision's operations give, one after the other."""
    pixels = photo(61, 83)
    data, keys = png(pixels), keys_of(count, seed=7)
    height, width = pixels.shape[:2]
    batch = images(program_of(Decode(), policy, CenterCrop(size=(height, width))), [data] * count, keys)
    sizes = np.full(count, height), np.full(count, width)
    stage_keys = keys.stage(policy.stage_name, 0)
    rounds = [policy.drawn_for(stage_keys, turn, *sizes) for turn in range(policy.rounds)]
    apart = torch.zeros(count)
    for i in range(count):
        expected = decoded(data)
        for drawn in rounds:
            name, magnitude = OPERATIONS[int(drawn.operation[i])], float(drawn.magnitude[i])
            expected = by_torchvision(expected, name, magnitude, policy.interpolation, policy.fill)
        apart[i] = ((batch[i].int() - expected.int()).abs() > 1).any(dim=0).float().mean()
    # A pixel that a warp takes from its neighbour is apart; it may change a statistic a little, and filters spread it.
    assert apart.median() == 0
    assert apart.max() < 20 * FEW


def frequencies(policy: AugmentPolicy, turn: int = 0, count: int = 20_000) -> dict[str, float]:
    """How often each operation is drawn."""
    drawn = policy.drawn(keys_of(count).stage(policy.stage_name, 0), turn)
    counts = np.bincount(drawn.operation, minlength=len(OPERATIONS))
    return {name: counts[i] / count for i, name in enumerate(OPERATIONS)}
