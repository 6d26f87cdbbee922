"""Nearest pixels of policies on an NVIDIA GPU: all of them are torchvision's, which runs on that GPU, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.pipeline.program import WarpStep
from gpuflow.pipeline.stage import Geometry, Keys
from gpuflow.stages.policy_parts import RANGES
from gpuflow.stages.trivial_augment import _RANGES
from tests.stages.policies import Fixed, by_torchvision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

BINS = 31


def warped(image: torch.Tensor, stage: Fixed) -> torch.Tensor:
    """An interleaved image uint8 [C, H, W] by the kernel of warps."""
    from gpuflow.execute.gpu.device_passes import interleaved, plan_of
    from gpuflow.execute.gpu.device_stream import DeviceStream
    from gpuflow.execute.kernels.warp import warp_all

    part = stage.parts()[0]
    assert isinstance(part, Geometry) and part.warps is not None
    stream: Any = torch.cuda.current_stream()
    held = interleaved(image[None], DeviceStream(image.device, stream))
    warping = WarpStep((part,), (0,), 10**6, part.warps).draw(Keys(0, 0, np.arange(1)), *held.sizes.T)
    out = torch.empty((1, *image.shape), dtype=torch.uint8, device=image.device)
    plan = torch.from_numpy(plan_of(warping, held.places, 0)).to(image.device)
    table = torch.arange(256, device=image.device).to(torch.uint8).expand(3, 256).contiguous()
    warp_all(plan, table, out, lookup=part.warps)
    return out[0]


@pytest.mark.parametrize("size", [(224, 224), (97, 331)], ids=str)
@pytest.mark.parametrize("ranges", [RANGES, _RANGES], ids=["rand_augment", "trivial_augment"])
def test_all_nearest_pixels_are_those_of_torchvision(ranges: Any, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8).cuda().permute(2, 0, 1)
    for name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"):
        side = {"": 1, "height": size[0], "width": size[1]}[ranges[name].of]
        for place, magnitude in enumerate(ranges[name].bins(BINS, side).tolist()):
            for signed in (magnitude, -magnitude):
                expected = by_torchvision(image, name, signed, "nearest", 9)
                found = warped(image, Fixed(name=name, magnitude=signed, fill=9))
                assert torch.equal(found, expected), (name, place, signed)
