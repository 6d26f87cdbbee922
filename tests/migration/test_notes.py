"""Law: what a transform notes, and what it leaves as a gap, arrives from within every container, at every depth."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from gpuflow.migration import Imported, read_source
from gpuflow.migration.from_torchvision import read_transform
from gpuflow.stages import STAGES

FILLS = {tv_tensors.Image: 0, tv_tensors.Mask: 255}
SILENT = v2.RandomHorizontalFlip()


class Holder(nn.Module):
    """A class of the user's that holds a Compose."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.inner = v2.Compose([transform])


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "v1.Compose": lambda one: v1.Compose([SILENT, one]),
    "v2.Compose": lambda one: v2.Compose([one, SILENT]),
    "Sequential": lambda one: nn.Sequential(SILENT, one if isinstance(one, nn.Module) else v2.Compose([one])),
    "v1.RandomApply": lambda one: v1.RandomApply([one], p=0.3),
    "v2.RandomApply": lambda one: v2.RandomApply([one], p=0.3),
    "v2.RandomApply of two": lambda one: v2.RandomApply([SILENT, one], p=0.3),
    "v1.RandomChoice": lambda one: v1.RandomChoice([SILENT, one]),
    "v2.RandomChoice": lambda one: v2.RandomChoice([one, SILENT]),
    "v1.RandomOrder": lambda one: v1.RandomOrder([SILENT, one]),
    "v2.RandomOrder": lambda one: v2.RandomOrder([one, SILENT]),
    "held": Holder,
}
NOTING: dict[str, Any] = {
    "resize": v2.Resize((20, 30)),
    "crop": v2.RandomResizedCrop(20),
    "rotate": v2.RandomRotation((9, 9)),
    "affine": v2.RandomAffine((9, 9)),
    "perspective": v2.RandomPerspective(0.5, p=1.0, fill=FILLS),
    "policy": v2.RandAugment(),
    "hue": v2.ColorJitter(hue=0.1),
    "photometric": v2.RandomPhotometricDistort(),
    "mask": v2.Pad(3, fill=FILLS),
    "mask by name": v2.RandomZoomOut(fill=FILLS),
    "type": v2.ToDtype(torch.float32, scale=True),
    "floats": nn.Sequential(v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ColorJitter(brightness=0.2)),
    "gap": v2.Resize((20, 30), InterpolationMode.LANCZOS),
    "lambda": v2.Lambda(lambda image: image),
}


def said(found: Imported) -> set[str]:
    """The notes, and the rules of the gaps."""
    return {*found.matches, *(problem.rule for problem in found.gaps)}


def read(transform: Any) -> Imported:
    return read_transform(transform, "user:transform", STAGES)


@pytest.mark.parametrize("name", NOTING)
def test_each_note_arrives_from_within_each_container_of_torchvision(name: str) -> None:
    alone = said(read(NOTING[name]))
    assert len(alone - said(read(SILENT))) >= 1
    random = said(read(SILENT)) - said(read(v2.Identity()))
    for outer, inner in product(CONTAINERS, repeat=2):
        for held in (CONTAINERS[inner](NOTING[name]), CONTAINERS[outer](CONTAINERS[inner](NOTING[name]))):
            assert alone - random <= said(read(held)), (outer, inner)


def test_containers_that_draw_give_their_nearest_entries() -> None:
    gray, flip = v2.Grayscale(3), v2.RandomHorizontalFlip(1.0)
    for container, names in (
        (v2.RandomChoice([gray, flip]), ["decode", "grayscale"]),
        (v2.RandomOrder([gray, flip]), ["decode", "grayscale", "flip"]),
    ):
        found = read(container)
        ((*entries,),) = found.pipelines.values()
        assert [entry.stage for entry in entries] == names
        assert len(found.gaps) == 1


def test_a_transform_of_floats_in_random_apply_knows_that_it_gets_floats() -> None:
    """A state that containers do not pass on would make its fill another level."""
    floats = (v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3))
    found = read(v2.Compose([*floats, v2.RandomApply([v2.RandomErasing(p=1.0)], p=0.3)]))
    ((_, erasing, _),) = found.pipelines.values()
    assert erasing.as_yaml == {"random_erasing": {"probability": 0.3, "value": [128, 128, 128]}}
    assert found.gaps == ()


# --- Albumentations ---------------------------------------------------------------------------------------------------

AFLIP = {"__class_fullname__": "HorizontalFlip", "p": 0.5}
ANOTING: dict[str, dict[str, Any]] = {
    "border": {"__class_fullname__": "Rotate", "p": 1.0, "limit": [-9, 9], "border_mode": 0},
    "hue": {
        "__class_fullname__": "ColorJitter",
        "p": 1.0,
        "hue": [-0.1, 0.1],
        **{key: [1, 1] for key in ("brightness", "contrast", "saturation")},
    },
    "targets": {"__class_fullname__": "VerticalFlip", "p": 1.0, "fill_mask": 255},
    "random": {"__class_fullname__": "RandomCrop", "p": 1.0, "height": 9, "width": 9},
    "gap": {"__class_fullname__": "GridDistortion", "p": 1.0},
    "filter": {"__class_fullname__": "Resize", "p": 1.0, "height": 9, "width": 9, "interpolation": 3},
}


def container(name: str, p: float, *parts: Any) -> dict[str, Any]:
    return {"__class_fullname__": name, "p": p, "transforms": list(parts)}


ACONTAINERS: dict[str, Callable[[Any], Any]] = {
    "Compose": lambda one: container("Compose", 1.0, AFLIP, one),
    "Compose with p": lambda one: container("Compose", 0.5, one),
    "ReplayCompose": lambda one: container("ReplayCompose", 1.0, one),
    "Sequential": lambda one: container("Sequential", 0.5, one, AFLIP),
    "OneOf": lambda one: container("OneOf", 0.5, AFLIP, one),
    "OneOrOther": lambda one: container("OneOrOther", 0.5, one, AFLIP),
    "SomeOf": lambda one: container("SomeOf", 1.0, AFLIP, one),
    "RandomOrder": lambda one: container("RandomOrder", 1.0, one),
}


@pytest.mark.parametrize("name", ANOTING)
def test_each_note_arrives_from_within_each_container_of_albumentations(name: str, tmp_path: Path) -> None:
    def saved(transform: Any) -> Imported:
        (tmp_path / "x.json").write_text(json.dumps({"transform": transform}))
        return read_source(f"albumentations:{tmp_path / 'x.json'}", STAGES)

    alone = said(saved(ANOTING[name]))
    assert len(alone) > 1
    for outer, inner in product(ACONTAINERS, repeat=2):
        for held in (ACONTAINERS[inner](ANOTING[name]), ACONTAINERS[outer](ACONTAINERS[inner](ANOTING[name]))):
            assert alone <= said(saved(held)), (outer, inner)
