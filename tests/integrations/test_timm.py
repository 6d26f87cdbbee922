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


def dataset_of(photos: Path) -> Any:
    return timm_data.create_dataset("", root=str(photos), split="")


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"interpolation": "bicubic", "crop_pct": 1.0, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}, {}),
        ({"crop_mode": "squash", "input_size": (3, 24, 32)}, {}),
        # timm shuffles here; the same stages, in order:
        ({"is_training": True, "no_aug": True}, {"is_training": False, "crop_mode": "squash", "crop_pct": 1.0}),
    ],
)
def test_batches_without_draws_are_timms(options: dict[str, Any], theirs: dict[str, Any], photos: Path) -> None:
    options = {"input_size": (3, 32, 32), "batch_size": 4, **CPU, **options}
    reference = timm_data.create_loader(dataset_of(photos), **{**options, **theirs})
    loader = create_loader(dataset_of(photos), **options)
    assert len(reference) == len(loader) == 3
    images, labels = (torch.cat(parts) for parts in zip(*reference, strict=True))
    batches = list(loader)
    order = torch.cat([batch.indices for batch in batches]).argsort()
    assert torch.equal(torch.cat([batch.labels for batch in batches])[order], labels)
    level = 1 / 255 / min(options.get("std", (0.224,)))
    difference = (torch.cat([batch.images for batch in batches])[order] - images).abs().max()
    assert difference < 1.1 * level, "timm resizes PIL images, which are one level away"


@pytest.mark.parametrize("names", [("cat ", "dog"), ("",)])
def test_names_of_classes_may_be_empty_or_end_with_a_blank(names: tuple[str, ...], tmp_path: Path) -> None:
    """timm gives a folder without classes, as its inference has, one without a name."""
    make_photos(tmp_path / "made", classes=len(names), each=3)
    (tmp_path / "photos").mkdir()
    for i, name in enumerate(filter(None, names)):
        (tmp_path / "made" / f"class_{i}").rename(tmp_path / "photos" / name)
    root = tmp_path / "photos" if names[0] else tmp_path / "made" / "class_0"
    loader = create_loader(dataset_of(root), input_size=(3, 32, 32), batch_size=4, **CPU)
    assert sorted(label for _, labels in loader for label in labels.tolist()) == sorted([*range(len(names))] * 3)


def test_labels_are_mixed_and_stay_probabilities_once_mixing_is_off(photos: Path) -> None:
    mixing = timm_data.FastCollateMixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=3)
    loader = create_loader(dataset_of(photos), 32, 4, is_training=True, collate_fn=mixing, **CPU)
    assert loader.mixup_enabled
    first = [labels for _, labels in loader]
    assert first[0].shape == (4, 3) and len(set(first[0].flatten().tolist())) > 2
    loader.mixup_enabled = False
    batches = list(loader)
    assert {batch.epoch for batch in batches} == {1}
    assert len(set(torch.cat([batch.labels for batch in batches]).flatten().tolist())) == 2, "one class, smoothed"
    loader.mixup_enabled = True
    assert {batch.epoch for batch in loader} == {2}


def test_mixing_that_is_turned_off_within_an_epoch_ends_with_it(photos: Path) -> None:
    mixing = timm_data.FastCollateMixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=3)
    loader = create_loader(dataset_of(photos), 32, 4, is_training=True, collate_fn=mixing, **CPU)
    whole, first, states = [batch.labels for batch in loader], [], []
    loader.set_epoch(0)
    for batch in loader:
        loader.mixup_enabled = False
        first.append(batch.labels)
        states.append(loader.state_dict())
    assert not loader.mixup_enabled
    assert torch.equal(torch.cat(first), torch.cat(whole))
    after = [batch.labels for batch in loader]
    assert len(set(torch.cat(after).flatten().tolist())) == 2, "one class, smoothed"
    other = create_loader(dataset_of(photos), 32, 4, is_training=True, collate_fn=mixing, **CPU)
    other.load_state_dict(states[0])
    assert torch.equal(torch.cat([batch.labels for batch in other]), torch.cat(whole[1:]))
    assert torch.equal(torch.cat([batch.labels for batch in other]), torch.cat(after))


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
