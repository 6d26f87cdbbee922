"""The colour kernels on an NVIDIA GPU against the CPU's stages, and how long they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.execute.cpu.native_chunk import run_pointwise
from gpuflow.execute.packing import send_all
from gpuflow.pipeline.stage import Keys, Operations
from gpuflow.stages import ColorJitter, Normalize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

SIDE = 224
STAGES = {
    "brightness": ColorJitter(brightness=0.9),
    "contrast": ColorJitter(contrast=0.9),
    "saturation": ColorJitter(saturation=0.9),
    "hue": ColorJitter(hue=0.5),
    "three": ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "four": ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "none": ColorJitter(),
}


def pictures(count: int, channels: int) -> torch.Tensor:
    """Smooth levels with noise, uint8 [count, SIDE, SIDE, C]."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    generator = torch.Generator().manual_seed(count)
    waves = torch.rand((count, 1, 1, channels, 3), generator=generator) * 0.1
    smooth = torch.sin(y[..., None] * waves[..., 0] + x[..., None] * waves[..., 1] + waves[..., 2] * 60) * 100 + 128
    noise = torch.randn((count, SIDE, SIDE, channels), generator=generator) * 10
    return (smooth + noise).clamp(0, 255).to(torch.uint8)


def normalize(channels: int, dtype: Any) -> Normalize:
    return Normalize(mean=(0.0,) * channels, std=(1 / 255,) * channels, dtype=dtype)


def operations_of(stage: ColorJitter, drawn: Any) -> Operations:
    side = np.full(len(drawn), SIDE)
    return stage.operations(drawn, side, side)


def device_table(stage: Normalize) -> torch.Tensor:
    return torch.from_numpy(stage.table()).view(getattr(torch, stage.dtype)).cuda()


def memory(count: int, channels: int, dtype: str, layout: str) -> torch.Tensor:
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    shape = (count, channels, SIDE, SIDE)
    return torch.full(shape, -1.0, dtype=getattr(torch, dtype), device="cuda").contiguous(memory_format=form)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", STAGES)
def test_equal_to_the_cpus_stages(name: str, channels: int) -> None:
    from gpuflow.execute.kernels.color import adjust, adjust_plan_of

    count, stage, tail = 12, STAGES[name], normalize(channels, "float32")
    images = pictures(count, channels)
    drawn = stage.draw(Keys(0, 0, np.arange(count)).stage("color_jitter", 0))
    operations = operations_of(stage, drawn)
    results = [run_pointwise(image, operations, i, tail.table(), planes=True) for i, image in enumerate(images.numpy())]
    expected = torch.from_numpy(np.stack(results))
    for layout in ("nchw", "nhwc"):
        out = memory(count, channels, "float32", layout)
        rows = np.arange(count)[::-1].copy()
        plan = send_all(adjust_plan_of(rows, operations), out.device)
        adjust(images.cuda(), plan, operations, device_table(tail), out)
        difference = (out.cpu()[rows.tolist()] - expected).abs()
        assert difference.max() == 0, f"{(difference > 0).sum()} of {difference.numel()}, at most {difference.max()}"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_256_images_take_less_than_half_a_millisecond(dtype: str, layout: str, capsys: Any) -> None:
    """Times work queued after a kernel that sleeps, so that the time of launches is not measured."""
    from gpuflow.execute.kernels.color import adjust, adjust_plan_of

    count, repeats = 256, 20
    images, rows, out = pictures(count, 3).cuda(), np.arange(count), memory(count, 3, dtype, layout)
    table = device_table(normalize(3, dtype))
    for name, stage in STAGES.items():
        operations = operations_of(stage, stage.draw(Keys(0, 0, rows).stage("color_jitter", 0)))
        plan = send_all(adjust_plan_of(rows, operations), out.device)
        adjust(images, plan, operations, table, out)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            adjust(images, plan, operations, table, out)
        end.record()
        end.synchronize()
        microseconds = start.elapsed_time(end) * 1000 / repeats
        with capsys.disabled():
            print(f"\n{name}, {dtype} {layout}: {microseconds:.0f} us for {count} images", end="")
        assert microseconds < 500
