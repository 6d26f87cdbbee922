"""Both arms of the detection recipe's loading yield the same things."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import gpuflow

LOADING = runpy.run_path(
    str(Path(__file__).parents[2] / "experiments" / "recipes" / "detection" / "loading.py"), run_name="loading"
)


@pytest.mark.parametrize("workload", LOADING["WORKLOADS"])
def test_both_yield_images_with_what_belongs_to_their_boxes(workload: str, tmp_path: Path) -> None:
    LOADING["make_photographs"](tmp_path, 8)
    fields = {"boxes", "labels", "masks"} if "masks" in workload else {"boxes", "labels"}
    torch.manual_seed(0)  # torchvision's transforms draw from it
    samples = LOADING["Photographs"](tmp_path / f"{workload}.json", tmp_path / "images")
    theirs, their_targets = LOADING["collate"]([samples[i] for i in range(8)])
    overrides = [f"source.coco={tmp_path}/{workload}.json", f"source.images={tmp_path}/images"]
    with gpuflow.load(LOADING["CONFIG"], "train", device="cpu", overrides=overrides) as loader:
        ours, our_targets = next(iter(loader))
    assert ours.shape == theirs.shape == (8, 3, 640, 640)
    assert ours.dtype == theirs.dtype == torch.float32
    for images in (ours, theirs):
        assert images.min() >= 0 and 0.1 < images.mean() < 0.9 and images.max() <= 1
    for targets in (our_targets, their_targets):
        for target in targets:
            assert fields <= set(target)
            assert len({len(target[name]) for name in fields}) == 1
            assert "masks" not in fields or target["masks"].shape[1:] == (640, 640)
    kept = [sum(len(target["boxes"]) for target in targets) for targets in (our_targets, their_targets)]
    assert min(kept) > 0.6 * 8 * LOADING["OBJECTS"]
