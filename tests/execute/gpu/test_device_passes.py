"""How images that the caller holds on a GPU are described to the kernels, here in the memory of the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from gpuflow.errors import LoaderError
from gpuflow.execute.gpu import device_passes
from gpuflow.execute.gpu.device_passes import DevicePasses, interleaved
from gpuflow.execute.gpu.passes import draw_passes, passes_of
from gpuflow.pipeline.program import fold, trace
from gpuflow.pipeline.stage import ImageSpec, Keys, Opaque, Pipeline
from gpuflow.stages import Decode, Resize
from tests.datasets import Entries, program
from tests.host_stream import HostStream

BATCHES = {
    "interleaved": torch.zeros(4, 5, 7, 3, dtype=torch.uint8).permute(0, 3, 1, 2),
    "planes": torch.zeros(4, 3, 5, 7, dtype=torch.uint8),
    "four bytes a pixel": torch.zeros(4, 5, 7, 4, dtype=torch.uint8).permute(0, 3, 1, 2)[:, :3],
    "columns in memory": torch.zeros(4, 7, 5, 3, dtype=torch.uint8).permute(0, 3, 2, 1),
    "gray": torch.zeros(4, 1, 5, 7, dtype=torch.uint8),
    "every other image": torch.zeros(8, 5, 7, 3, dtype=torch.uint8).permute(0, 3, 1, 2)[::2],
    "one image, repeated": torch.zeros(1, 5, 7, 3, dtype=torch.uint8).permute(0, 3, 1, 2).expand(4, -1, -1, -1),
    "parts of larger planes": torch.zeros(4, 3, 9, 9, dtype=torch.uint8)[:, :, 1:6, 1:8],
    "none": torch.zeros(0, 3, 5, 7, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_described_as_its_images_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr(device_passes, "interleave", lambda plan, *_, **__: plans.append(plan.clone()))
    stream: Any = HostStream()
    batch = BATCHES[name]
    whole, each = interleaved(batch, stream), interleaved(list(batch), stream)
    assert whole.sizes.tolist() == each.sizes.tolist() == [[5, 7]] * len(batch)
    assert np.array_equal(whole.places[:, 1:], each.places[:, 1:])
    if plans:
        assert name in ("planes", "parts of larger planes")
        first, second = plans
        assert torch.equal(first[:, :-1], second[:, :-1]), "the last column is where an image is copied to"
        assert np.array_equal(whole.places[:, 0], first[:, -1]) and np.array_equal(each.places[:, 0], second[:, -1])
        assert (whole.places[:, 1:] == [7 * 3, 3]).all()
    else:
        assert np.array_equal(whole.places, each.places)
        assert whole.places.tolist() == [[image.data_ptr(), *image.stride()[1:]] for image in batch]


def test_passes_that_change_few_images_write_to_the_images_that_they_read() -> None:
    """Not the first and the last pass, nor one that moves pixels or whose table changes levels."""
    stages: Entries = (
        {"decode": {}},
        {"resize": {"height": 9, "width": 8}},
        {"color_jitter": {"hue": 0.4, "probability": 0.4}},
        {"gaussian_blur": {"kernel_size": 3, "probability": 0.4}},
        {"affine": {"degrees": 40}},
        {"sharpness": {"amount": 0.9}},
        {"normalize": {}},
    )
    passes, stream = passes_of(program(stages)), HostStream()
    assert not isinstance(passes, str), passes
    of_device: Any = DevicePasses(passes, stream)  # type: ignore[arg-type]
    assert [type(one.step).__name__[:5] for one in passes] == ["Resam", "Point", "Local", "WarpS", "Local"]
    assert of_device.in_place == [False, True, True, False, False]
    slots = torch.empty(2, 3, 9, 8)
    draws = draw_passes(passes, Keys(0, 0, np.arange(2)), np.array([[20, 30]] * 2))
    targets = of_device.targets(slots, draws, np.arange(2))
    resampled, jittered, blurred, warped, last = (target.images for target in targets)
    assert resampled is jittered is blurred and warped is not resampled and last is slots


class OfGpu(torch.Tensor):
    """In the CPU's memory; `cpu` makes a plain tensor of it, as of one of a GPU."""

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


@dataclass(frozen=True, kw_only=True, repr=False)
class Halved(Opaque):
    """Halves levels; without `copied` by an operator that has a form for CUDA alone."""

    stage_name: ClassVar[str] = "halved"

    copied: bool = False

    @property
    def on_gpu(self) -> bool:
        return not self.copied

    def output(self, spec: ImageSpec) -> ImageSpec:
        return spec

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        if self.copied:
            assert type(image) is torch.Tensor
            return image // 2
        return torch.ops.gpuflow_test.halve(image)  # type: ignore[no-any-return]


def called(stage: Halved) -> torch.Tensor:
    pipeline = Pipeline("x", (Decode(), Resize(height=4, width=5), stage))
    passes = passes_of(fold(pipeline, trace(pipeline)))
    assert not isinstance(passes, str), passes
    stream: Any = HostStream()
    images = torch.full((3, 3, 4, 5), 9, dtype=torch.uint8)
    target = torch.zeros_like(images)
    DevicePasses(passes, stream).run_pass(1, np.arange(3), images.as_subclass(OfGpu), target, [torch.tensor([2, 0, 1])])
    return target


def test_a_stage_for_the_cpu_gets_copies_of_a_gpus_images() -> None:
    assert (called(Halved(copied=True)) == 4).all()


def test_an_operator_without_a_form_for_the_device_is_no_bad_sample() -> None:
    new: Any = torch.library.Library
    library = new("gpuflow_test", "DEF")
    library.define("halve(Tensor image) -> Tensor")
    library.impl("halve", lambda image: image // 2, "CUDA")
    with pytest.raises(LoaderError, match=r"^halved: has no form for cpu: Could not run.*; add one .* Halved\.on_gpu"):
        called(Halved())
