"""What gpuflow.wrap makes of the transforms that it is given. test_from_torchvision has each of torchvision's."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

import gpuflow
from gpuflow.errors import ConfigError
from gpuflow.migration.wrap import Cv2Resize, stages_of
from gpuflow.stages import STAGES

AUGMENTATIONS: list[dict[str, Any]] = [
    {"random_crop": {"size": 24}},
    {"flip": {"horizontal": 0.5}},
    {"grayscale": {"probability": 0.1}},
    {"rotate": {"degrees": 15, "interpolation": "nearest"}},
    {"color_jitter": {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.1}},
]
NORMALIZE = {"normalize": {"mean": "imagenet", "std": "imagenet"}}


def entries(transforms: Any, *, tensor: bool = True) -> list[Any]:
    return list(stages_of(transforms, "transforms_gpu", STAGES, tensor=tensor).entries)


def augmentations(module: Any) -> list[Any]:
    jitter, rotation = module.ColorJitter(0.2, 0.2, 0.2, 0.1), module.RandomRotation(15)
    return [module.RandomCrop(24), module.RandomHorizontalFlip(), module.RandomGrayscale(), rotation, jitter]


@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
def test_the_integrations_transforms_are_stages(module: Any) -> None:
    normalize = module.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    on_gpu = module.Compose([*augmentations(module), gpuflow.TensorToTensor(), normalize])
    assert entries(on_gpu) == [*AUGMENTATIONS, NORMALIZE]
    resize = gpuflow.cv2_resize((32, 28))
    on_cpu = v1.Compose([resize, v1.ToPILImage(), *augmentations(module), v1.ToTensor(), normalize])
    found = stages_of(on_cpu, "transforms_cpu", STAGES, tensor=False)
    assert (list(found.entries), found.resize) == ([*AUGMENTATIONS, NORMALIZE], resize)


def test_lists_nested_ones_and_single_transforms_are_taken() -> None:
    flip, unchanged = {"flip": {"horizontal": 0.5}}, {"normalize": {"mean": [0, 0, 0], "std": [1, 1, 1]}}
    nested = v1.Compose([v1.RandomHorizontalFlip(), v2.Compose([gpuflow.TensorToTensor()])])
    assert entries(nested) == entries([nested]) == [flip, unchanged]
    assert entries(torch.nn.Sequential(v2.RandomHorizontalFlip())) == entries(v1.RandomHorizontalFlip()) == [flip]
    assert entries([]) == entries(v1.Compose([v1.ToPILImage()])) == []
    with pytest.warns(UserWarning, match="deprecated"):
        assert entries([v2.RandomHorizontalFlip(), v2.ToTensor()]) == [flip, unchanged]


def test_tensors_are_resized_as_tensors_and_pil_images_with_antialiasing() -> None:
    resize = v1.Resize((8, 9), antialias=False)
    assert entries(resize) == [{"resize": {"height": 8, "width": 9, "antialias": False}}]
    assert entries(resize, tensor=False) == [{"resize": {"height": 8, "width": 9}}]


class Negative:
    """A transform of the user's own."""

    def __call__(self, image: Any) -> Any:
        return 255 - image


def test_transforms_without_a_stage_are_named_at_once_with_their_places() -> None:
    with pytest.raises(ConfigError) as caught:
        entries([v1.RandomCrop(8), Negative(), v1.Compose([v1.FiveCrop(4)]), gpuflow.cv2_resize((8, 8))])
    first, second, third = str(caught.value).splitlines()
    assert first == (
        "gpuflow.wrap: transforms_gpu[3] must be the first transform, because the file decodes and resizes; "
        "move it to the front"
    )
    assert second.startswith(
        "gpuflow.wrap: transforms_gpu[1]: Negative is not a transform that gpuflow knows; nearest: leave it out"
    )
    assert third.startswith("gpuflow.wrap: transforms_gpu[2][0]: FiveCrop gives five images; nearest: leave it out")
    assert [problem.code for problem in caught.value.problems] == ["config.conflict", "import.stage", "import.stage"]


def test_the_integrations_own_transforms_can_be_called() -> None:
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    resize = gpuflow.cv2_resize((3, 4))
    assert resize == Cv2Resize(3, 4) and np.array_equal(resize(image), cv2.resize(image, (4, 3)))
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(gpuflow.TensorToTensor()(levels), levels.float() / 255)
    assert repr(gpuflow.TensorToTensor()) == "TensorToTensor()"
