"""The detection recipe: its targets are torchvision's on the same parameters, and a detector learns from them."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

import gpuflow
from gpuflow.loader.decode import with_values
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.records import Ragged
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.targets import moves_of
from gpuflow.sources import records_of
from tests.datasets import one_torch_thread
from tests.masks import instance_mask
from tests.records import torchvision_moves

HERE = Path(__file__).parents[2] / "experiments" / "recipes" / "detection"
RUN = runpy.run_path(str(HERE / "run.py"))


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with one_torch_thread(seconds=240):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("coco")
    RUN["make_samples"](made, count=12)
    return made


def by_torchvision(loader: gpuflow.Loader, folder: Path, index: int, position: int) -> tuple[Any, Any, Any]:
    """Boxes, labels and masks of one sample, mapped by torchvision on the parameters that gpuflow draws."""
    source, program = loader.dataset, loader._plan.program
    assert isinstance(program, Program)
    records = records_of(source, [index])
    column, labels, masks = (records.columns[name] for name in loader._plan.targets.names)  # type: ignore[union-attr]
    assert isinstance(column, Ragged) and isinstance(labels, Ragged) and isinstance(masks, list)
    image = cv2.imread(source.path(index))
    assert image is not None
    size = (image.shape[0], image.shape[1])
    keys, _ = with_values(loader._plan, Keys(0, 0, np.array([position])), [index])
    placed = moves_of(program, keys, np.array([size]))
    moves = [one.move for one in placed if one.move is not None]
    assert len(moves) == len(placed), "the recipe has one warp"
    boxes = tv_tensors.BoundingBoxes(torch.from_numpy(column[0]), format="XYXY", canvas_size=size)
    boxes = F.clamp_bounding_boxes(torchvision_moves(boxes, moves, 0))
    pixels = torch.from_numpy(np.array([instance_mask(mask, size) for mask in masks[0]]))
    return boxes, labels[0], torchvision_moves(tv_tensors.Mask(pixels), moves, 0)


@pytest.mark.parametrize("name", ["train", "train_ssd", "train_lsj", "val"])
def test_targets_equal_torchvisions(name: str, folder: Path) -> None:
    """A box that is kept is torchvision's, with its label and its mask; one that is not is small or mostly outside."""
    found = kept = 0
    with gpuflow.load(RUN["CONFIG"], name, overrides=RUN["overrides"](folder, 64, 4)) as loader:
        for step, (images, targets) in enumerate(loader):
            for i, target in enumerate(targets):
                boxes, labels, masks = by_torchvision(loader, folder, int(target["image_id"]), 4 * step + i)
                found, kept = found + len(boxes), kept + len(target["boxes"])
                assert images[i].shape == (3, 64, 64) and target["boxes"].canvas_size == (64, 64)
                for box, label, mask in zip(target["boxes"], target["labels"], target["masks"], strict=True):
                    (same,) = torch.nonzero((boxes - box).abs().amax(dim=1) < 1e-3).flatten().tolist()
                    assert label == labels[same] + 1
                    assert (mask != masks[same]).float().mean() < 1e-3
    assert found * 0.3 < kept <= found and (name != "val" or kept == found)


@pytest.mark.slow
def test_a_detector_learns(folder: Path) -> None:
    losses = RUN["train"](folder, 6, 64, 2, "cpu")
    assert all(np.isfinite(losses))
    assert sum(losses[-2:]) < sum(losses[:2])
