"""timm's `create_loader` and gpuflow's with the same arguments, and a loop as in timm's train.py that is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpuflow.integrations.timm import create_loader
from tests.datasets import make_photos
from tests.integrations.killing import make_data, run, steps, weights_equal

timm_data = pytest.importorskip("timm.data", reason="timm is not installed")

SCRIPT = Path(__file__).with_name("timm_script.py")
CPU: dict[str, Any] = {"device": torch.device("cpu"), "num_workers": 0, "persistent_workers": False}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes whose natural order, 2, 10, x, is not that of their names."""
    root = tmp_path_factory.mktemp("photos")
    make_photos(root, classes=3, each=4)
    for old, new in (("class_0", "10"), ("class_1", "2"), ("class_2", "x")):
        (root / old).rename(root / new)
    return root


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interpolation": "bicubic", "crop_pct": 1.0, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)},
        {"crop_mode": "squash", "input_size": (3, 24, 32)},
        {"is_training": True, "no_aug": True},
    ],
)
def test_batches_without_draws_are_timms(options: dict[str, Any], photos: Path) -> None:
    options = {"input_size": (3, 32, 32), **options}
    dataset = timm_data.create_dataset("", root=str(photos), split="")
    theirs = timm_data.create_loader(dataset, batch_size=4, **options, **CPU)
    with_gpuflow = create_loader(timm_data.create_dataset("", root=str(photos), split=""), batch_size=4, **options, **CPU)
    assert len(theirs) == len(with_gpuflow) == 3
    images, labels = (torch.cat(parts) for parts in zip(*theirs, strict=True))
    ours = list(with_gpuflow)
    if options.get("is_training"):
        order = torch.cat([batch.indices for batch in ours]).argsort()
        dataset.transform.transforms  # noqa: B018
        theirs = timm_data.create_loader(dataset, batch_size=4, **{**options, "is_training": False, "crop_mode": "squash", "crop_pct": 1.0}, **CPU)
        images, labels = (torch.cat(parts) for parts in zip(*theirs, strict=True))
    else:
        order = torch.arange(12)
    assert torch.equal(torch.cat([batch.labels for batch in ours])[order], labels)
    level = 1 / 255 / min(options.get("std", (0.224,)))
    assert (torch.cat([batch.images for batch in ours])[order] - images).abs().max() < 1.1 * level, "PIL is 1 level away"


def test_labels_are_mixed_and_stay_probabilities_once_mixing_is_off(photos: Path) -> None:
    mixing = timm_data.FastCollateMixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=3)
    dataset = timm_data.create_dataset("", root=str(photos), split="")
    loader = create_loader(dataset, 32, 4, is_training=True, collate_fn=mixing, **CPU)
    assert loader.mixup_enabled
    first = [labels for _, labels in loader]
    assert first[0].shape == (4, 3) and len(first[0].unique()) > 2
    loader.mixup_enabled = False
    batches = list(loader)
    assert {batch.epoch for batch in batches} == {1}
    assert torch.cat([batch.labels for batch in batches]).unique().numel() == 2, "one class each, smoothed"
    loader.mixup_enabled = True
    assert {batch.epoch for batch in loader} == {2}


def test_a_killed_run_goes_on_with_the_next_step(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        make_data(tmp_path / name)
    run(SCRIPT, tmp_path / "whole", tmp_path / "whole" / "all.jsonl", "2")
    for kill_at in (5, 9):
        log = tmp_path / "cut" / f"killed_{kill_at}.jsonl"
        (tmp_path / "cut" / "last.pt").unlink(missing_ok=True)
        run(SCRIPT, tmp_path / "cut", log, "2", kill_at=kill_at)
        run(SCRIPT, tmp_path / "cut", tmp_path / "cut" / f"resumed_{kill_at}.jsonl", "2", "resume")
        taken = steps(log)[: kill_at // 2 * 2] + steps(tmp_path / "cut" / f"resumed_{kill_at}.jsonl")
        assert taken == steps(tmp_path / "whole" / "all.jsonl")
        assert weights_equal(tmp_path / "whole" / "all.pt", tmp_path / "cut" / f"resumed_{kill_at}.pt")
