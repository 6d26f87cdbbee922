"""Transforms as users write them, for `gpuflow import tests.migration.their_transforms:NAME`."""

from __future__ import annotations

import torch
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
SCALED = (v2.ToImage(), v2.ToDtype(torch.float32, scale=True))

train = v1.Compose(
    [
        v1.RandomResizedCrop(48),
        v1.RandomHorizontalFlip(),
        v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v1.ToTensor(),
        v1.Normalize(*IMAGENET),
        v1.RandomErasing(p=0.25),
    ]
)
val = v2.Compose([v2.Resize(56), v2.CenterCrop(48), *SCALED, v2.Normalize(*IMAGENET)])
lanczos = v1.Compose([v1.Resize((40, 48), InterpolationMode.LANCZOS), v1.ToTensor()])
nested = v2.Compose([v2.Compose([v2.Resize([40, 48])]), nn.Sequential(v2.Grayscale(3)), v2.PILToTensor()])
with_lambda = v1.Compose([v1.Resize((40, 48)), v1.Lambda(lambda image: image.rotate(180)), v1.ToTensor()])
two_warps = v2.Compose(
    [v2.Resize((48, 48)), v2.RandomRotation(9), v2.RandomHorizontalFlip(), v2.RandomAffine(9), *SCALED]
)
one_warp = v2.Compose([v2.RandomRotation(9), v2.Resize((48, 48)), v2.RandomAffine(9), *SCALED])
no_size = v1.Compose([v1.ToTensor()])
bicubic = v1.Compose([v1.Resize((224, 224), InterpolationMode.BICUBIC), v1.ToTensor()])
number = 7


def untouched(image: object) -> object:
    """A function among transforms, as CLIP's preprocessing has one."""
    return image


with_function = v1.Compose([untouched, v1.Resize((40, 48)), v1.ToTensor()])
