"""Which stages stand for torchvision's transforms, and what is said of those that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

import gpuflow
from gpuflow.config.stage_entries import make_stage
from gpuflow.errors import ConfigError
from gpuflow.migration.transforms import Cv2Resize, stages_of
from gpuflow.stages import STAGES

BOTH: dict[str, tuple[Callable[[Any], Any], list[dict[str, Any]]]] = {
    "crop": (lambda v: v.RandomCrop(24), [{"random_crop": {"size": 24}}]),
    "crop of a box": (lambda v: v.RandomCrop((24, 30)), [{"random_crop": {"size": [24, 30]}}]),
    "crop with padding": (lambda v: v.RandomCrop(24, 4), [{"random_crop": {"size": 24, "padding": 4}}]),
    "crop with paddings": (
        lambda v: v.RandomCrop(24, [1, 2, 3, 4], padding_mode="reflect"),
        [{"pad": {"padding": [1, 2, 3, 4], "border": "reflect", "fill": 0}}, {"random_crop": {"size": 24}}],
    ),
    "crop with a fill": (
        lambda v: v.RandomCrop(24, (4, 2), fill=9),
        [{"pad": {"padding": [4, 2, 4, 2], "border": "constant", "fill": 9}}, {"random_crop": {"size": 24}}],
    ),
    "flip": (lambda v: v.RandomHorizontalFlip(0.3), [{"flip": {"horizontal": 0.3}}]),
    "upside down": (lambda v: v.RandomVerticalFlip(), [{"flip": {"vertical": 0.5}}]),
    "gray at random": (lambda v: v.RandomGrayscale(), [{"grayscale": {"probability": 0.1}}]),
    "gray": (lambda v: v.Grayscale(3), [{"grayscale": {}}]),
    "rotation": (
        lambda v: v.RandomRotation(30),
        [{"rotate": {"degrees": 30.0, "interpolation": "nearest", "fill": 0}}],
    ),
    "rotation in colour": (
        lambda v: v.RandomRotation((10, 30), InterpolationMode.BILINEAR, fill=(9, 8, 7)),
        [{"rotate": {"degrees": [10.0, 30.0], "interpolation": "bilinear", "fill": [9, 8, 7]}}],
    ),
    "jitter": (
        lambda v: v.ColorJitter(0.4, contrast=(0.5, 1.5), saturation=1.2, hue=0.1),
        [{"color_jitter": {"brightness": 0.4, "contrast": 0.5, "saturation": 1.2, "hue": 0.1}}],
    ),
    "jitter of a range": (lambda v: v.ColorJitter((0.4, 1.2)), [{"color_jitter": {"brightness": [0.4, 1.2]}}]),
    "resize": (
        lambda v: v.Resize(256, InterpolationMode.BICUBIC),
        [{"resize": {"shorter": 256, "interpolation": "bicubic", "antialias": True}}],
    ),
    "resize to a box": (
        lambda v: v.Resize((40, 30), antialias=False),
        [{"resize": {"height": 40, "width": 30, "interpolation": "bilinear", "antialias": False}}],
    ),
    "centre": (lambda v: v.CenterCrop(24), [{"center_crop": {"size": 24}}]),
    "inception": (
        lambda v: v.RandomResizedCrop(24, (0.2, 1.0)),
        [
            {
                "random_resized_crop": {
                    "size": 24,
                    "scale": [0.2, 1.0],
                    "ratio": [3 / 4, 4 / 3],
                    "interpolation": "bilinear",
                    "antialias": True,
                }
            }
        ],
    ),
}


def entries(transforms: Any) -> list[Any]:
    return list(stages_of(transforms, "transforms_gpu", "gpuflow.wrap:").entries)


@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", BOTH)
def test_transforms_of_both_versions_have_equal_stages(name: str, module: Any) -> None:
    make, expected = BOTH[name]
    transform = make(module)
    assert entries(transform) == expected
    stages = [make_stage(entry, STAGES) for entry in expected]
    if module is v2 and len(stages) == 1 and name not in ("gray", "flip", "upside down"):
        theirs, ours = (
            {key: str(value) for key, value in vars(one).items() if key != "_fill"}
            for one in (transform, stages[0].torchvision())
        )
        assert theirs == ours | {key: theirs[key] for key in ("fill", "padding") if key in theirs}


def test_what_scales_and_normalizes_is_one_stage_behind_those_of_levels() -> None:
    normalize = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    flip, imagenet = {"flip": {"horizontal": 0.5}}, {"normalize": {"mean": "imagenet", "std": "imagenet"}}
    for scale in ([gpuflow.TensorToTensor()], [v1.ToTensor()], [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]):
        assert entries([v1.RandomHorizontalFlip(), *scale, normalize]) == [flip, imagenet]
        assert entries(v1.Compose([*scale, v1.Compose([normalize]), v1.RandomHorizontalFlip()])) == [flip, imagenet]
    module = torch.nn.Sequential(v2.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32))
    assert entries(module) == [flip, {"normalize": {"mean": [0.0] * 3, "std": [1.0] * 3}}]
    assert entries([]) == entries(v1.Compose([v1.ToPILImage()])) == []


def test_other_transforms_of_v2_run_as_they_are() -> None:
    blur = v2.GaussianBlur(5, (0.5, 1.0))
    assert entries(blur) == [{"torchvision": {"name": "GaussianBlur", "kernel_size": [5, 5], "sigma": [0.5, 1.0]}}]
    affine = v2.RandomAffine(10, interpolation=InterpolationMode.BILINEAR)
    expected = {"torchvision": {"name": "RandomAffine", "degrees": [-10.0, 10.0], "interpolation": "bilinear"}}
    assert entries(affine) == [expected]
    stage = make_stage(expected, STAGES)
    assert repr(stage.torchvision()) == repr(affine)
    scaled = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3), v2.RandomErasing(0.25)]
    assert [next(iter(entry)) for entry in entries(scaled)] == ["normalize", "torchvision"]


class Negative:
    """A transform of the user's own."""

    def __call__(self, image: Any) -> Any:
        return image


KNOW = "use a transform of torchvision.transforms.v2, or write a stage for it in the file"
REFUSED: dict[str, tuple[Any, str]] = {
    "own": ([v1.RandomCrop(8), Negative()], f"[1] Negative has no equal stage: gpuflow does not know it; {KNOW}"),
    "lambda": ([lambda image: image], f"[0] {{}} has no equal stage: gpuflow does not know it; {KNOW}"),
    "v1": ([v1.RandomPerspective()], f"[0] RandomPerspective has no equal stage: gpuflow does not know it; {KNOW}"),
    "nested": (
        [v1.Compose([v1.ToPILImage(), v1.RandomApply([v1.ColorJitter(0.1)])])],
        f"[0][1] RandomApply has no equal stage: gpuflow does not know it; {KNOW}",
    ),
    "parameters": (
        v1.RandomRotation(9, expand=True),
        f" RandomRotation has no equal stage: gpuflow does not know its parameters; {KNOW}",
    ),
    "twice": (
        [v1.ToTensor(), gpuflow.TensorToTensor()],
        "[1] TensorToTensor divides by 255 a second time; remove one of the two",
    ),
    "normalized twice": (
        [v1.ToTensor(), *[v1.Normalize([0.5] * 3, [0.5] * 3)] * 2],
        "[2] Normalize normalizes a second time; remove one of the two",
    ),
    "levels": (
        [v1.Normalize([0.5] * 3, [0.5] * 3)],
        "[0] Normalize works on numbers of 0-1 and gets levels of 0-255; put gpuflow.TensorToTensor() before it",
    ),
    "late": (
        [v1.ToTensor(), v1.ColorJitter(0.4)],
        "[1] ColorJitter stands where torchvision changes numbers of 0-1; put it before ToTensor, to change levels of "
        "0-255",
    ),
    "resize": (
        [v1.RandomCrop(8), gpuflow.cv2_resize((8, 8))],
        "[1] Cv2Resize must be the first transform, because the file decodes and resizes; move it to the front",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_transform_without_a_stage_is_named_with_what_to_do(name: str) -> None:
    transforms, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        entries(transforms)
    shown = getattr(transforms[0], "__qualname__", "") if name == "lambda" else ""
    assert str(caught.value) == "gpuflow.wrap: transforms_gpu" + text.replace("{}", shown)


def test_all_faulty_transforms_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        entries([Negative(), v1.RandomCrop(8), v1.FiveCrop(4)])
    assert [problem.path for problem in caught.value.problems] == [("transforms_gpu", 0), ("transforms_gpu", 2)]


def test_the_integrations_own_transforms_can_be_called() -> None:
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    resize = gpuflow.cv2_resize((3, 4))
    assert resize == Cv2Resize(3, 4) and np.array_equal(resize(image), cv2.resize(image, (4, 3)))
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(gpuflow.TensorToTensor()(levels), levels.float() / 255)
    assert repr(gpuflow.TensorToTensor()) == "TensorToTensor()"
