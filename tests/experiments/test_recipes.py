"""experiments/recipes: each recipe trains a few steps on a CPU and validates."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpuflow
from gpuflow.errors import StateError
from gpuflow.execute.cpu import runner as cpu_runner
from gpuflow.execute.cpu.native_chunk import run_chunk
from gpuflow.tools.bench import COLUMNS
from tests.datasets import make_photos, one_torch_thread
from tests.experiments.scripts import imported

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "experiments" / "recipes"
SMALL: dict[str, Any] = {"size": 32, "batch": 4, "epochs": 1}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread(seconds=300):
        yield


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with imported(RECIPES / "classification", ["run"]) as modules:
        yield modules["run"]


@pytest.fixture(scope="module")
def self_supervised() -> Iterator[Any]:
    with imported(RECIPES / "self_supervised", ["run"]) as modules:
        yield modules["run"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe") / "photos"
    make_photos(folder, classes=2, each=10)
    return folder


def test_classification_trains_and_validates(run: Any, photos: Path) -> None:
    passes = run.train(photos, **SMALL, device="cpu")
    assert [(name, epoch) for name, epoch, _ in passes] == [("train", 0), ("val", 0)]
    assert all(math.isfinite(result.loss) and 0 <= result.measures["accuracy"] <= 1 for _, _, result in passes)


def test_a_resumed_epoch_of_classification_equals_an_uninterrupted_one(run: Any, photos: Path, tmp_path: Path) -> None:
    overrides = run.overrides(photos, **SMALL, out=tmp_path)

    def load(*more: str) -> gpuflow.Loader:
        return gpuflow.load(run.CONFIG, "train", device="cpu", overrides=[*overrides, *more])

    with load() as loader:
        whole, states = [], []
        for batch in loader:
            assert (batch.labels.dtype, batch.labels.shape) == (torch.float32, (4, 2))
            assert torch.allclose(batch.labels.sum(dim=1), torch.ones(4))
            whole.append(batch)
            states.append(loader.state_dict())
    assert len(whole) == 4
    for step, state in enumerate(states[:-1], start=1):
        with load("run.threads=1") as loader:
            loader.load_state_dict(state)
            for expected, batch in zip(whole[step:], loader, strict=True):
                assert torch.equal(batch.images, expected.images) and torch.equal(batch.labels, expected.labels)
    with load("pipelines.train.stages.mixup.alpha=0.4") as loader, pytest.raises(StateError):
        loader.load_state_dict(states[0])


def test_segmentation_trains_and_finds_classes(tmp_path: Path) -> None:
    with imported(RECIPES / "segmentation", ["run"]) as modules:
        recipe = modules["run"]
        recipe.make_detection_samples(tmp_path, 24)
        result = recipe.train(tmp_path, 6, 48, "cpu", batch=4)
        assert len(result.losses) == 6 and all(math.isfinite(loss) for loss in result.losses)
        assert len(result.ious) == len(recipe.CLASSES) and 0 < result.mean_iou <= 1
        found, wanted = torch.tensor([0, 0, 1, 3, 2]), torch.tensor([0, 1, 1, 255, 2])
        assert recipe.ious_of(recipe.confusion(found, wanted)) == [0.5, 0.5, 1, 0]


@pytest.mark.parametrize("pairs", [True, False])
def test_keypoints_train_and_are_found(pairs: bool, tmp_path: Path) -> None:
    with imported(RECIPES / "keypoints", ["run"]) as modules:
        recipe = modules["run"]
        recipe.make_samples(tmp_path, 40)
        result = recipe.train(tmp_path, 6, 32, "cpu", batch=8, pairs=pairs)
        assert len(result.losses) == 6 and all(math.isfinite(loss) for loss in result.losses)
        assert len(result.pcks) == len(recipe.NAMES) and 0 <= result.pck <= 1
        points = torch.tensor([[[5.0, 5, 2], [9, 5, 1], [9, 9, 0]]])
        seen, near = recipe.correct(points[..., :2] + torch.tensor([0.0, 0.9]), points, torch.tensor([[0.0, 0, 10, 4]]))
        assert (seen.tolist(), near.tolist()) == ([[True, True, False]], [[True, True, False]])
        assert not recipe.correct(points[..., :2] + 0.9, points, torch.tensor([[0.0, 0, 10, 4]]))[1].any()


def test_detections_are_evaluated_as_by_coco(tmp_path: Path) -> None:
    """Of the annotations themselves the precision is 1, and of moved ones less."""
    pytest.importorskip("pycocotools")
    with imported(RECIPES / "detection", ["run"]) as modules:
        recipe = modules["run"]
        recipe.make_samples(tmp_path, count=8)
        model, losses = recipe.trained(tmp_path, 2, 48, 4, "cpu", "train_ssd")
        figures = recipe.evaluate(model, tmp_path, 48, 4, "cpu")
        assert len(losses) == 2 and all(0 <= value <= 1 for value in figures.values())
        boxes, masks = torch.tensor([[2.0, 3, 20, 30]]), torch.zeros(1, 48, 48)
        masks[0, 3:30, 2:20] = 1
        wanted = recipe.objects_of(7, boxes, torch.tensor([1]), masks)
        for shift, expected in ((0, 1.0), (30, 0.0)):
            found = recipe.objects_of(7, boxes + shift, torch.tensor([1]), masks.roll(shift, 2), torch.tensor([0.9]))
            figures = recipe.average_precision(wanted, found, 48)
            assert list(figures.values()) == pytest.approx([expected] * 4)
        assert recipe.average_precision(wanted, [], 48) == dict.fromkeys(figures, 0.0)


@pytest.mark.slow
def test_eight_views_lower_the_self_supervised_loss(self_supervised: Any, photos: Path) -> None:
    losses = self_supervised.train(photos, 8, 24, 8, "cpu")
    assert len(losses) == 8 and all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3])


def test_the_views_of_the_self_supervised_recipe_share_one_decoding(
    self_supervised: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []

    def counted(inputs: Any, made: Any, *others: Any, **options: Any) -> float:
        outputs.append(len(made))
        return run_chunk(inputs, made, *others, **options)

    monkeypatch.setattr(cpu_runner, "run_chunk", counted)
    overrides = self_supervised.overrides(photos, 24, 5)
    with gpuflow.load(self_supervised.CONFIG, "train", device="cpu", overrides=overrides) as loader:
        shapes = [{name: tuple(view.shape) for name, view in batch.views.items()} for batch in loader]
    large, small = (1, 5, 3, 24, 24), (6, 5, 3, 12, 12)
    assert shapes == [{"global_1": large, "global_2": large, "local": small}] * 4
    assert outputs and set(outputs) == {8}, "one call decodes an image and makes all of its views"


def test_the_contrastive_loss_has_the_stated_bounds(self_supervised: Any) -> None:
    same = torch.eye(4)[:1].expand(8, 3, 4)
    assert self_supervised.contrastive_loss(same).item() == pytest.approx(math.log(8 * 3 - 1))
    apart = torch.eye(4)[:3].expand(8, 3, 4)
    assert self_supervised.contrastive_loss(apart, temperature=0.01).item() == pytest.approx(math.log(7))


@pytest.mark.parametrize("name", ["classification", "self_supervised", "detection", "segmentation", "keypoints"])
def test_the_results_of_a_recipe_are_tidy_and_the_loss_falls(name: str) -> None:
    with (RECIPES / name / "results.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == COLUMNS
    figures: dict[str, list[float]] = {}
    for row in rows:
        figures.setdefault(row["metric"], []).append(float(row["value"]))
    assert figures["processor_seconds"][0] / 2 < 75
    if name == "classification":
        for metric in ("train_loss", "val_loss"):
            assert figures[metric] == sorted(figures[metric], reverse=True)
        assert len(figures["val_accuracy"]) == 4 and figures["val_accuracy"][-1] > 5 / 15
    else:
        assert figures["loss_of_last_steps"][0] < 0.9 * figures["loss_of_first_steps"][0]
    for metric, least in {"detection": {"ap50_of_boxes": 0.2}, "segmentation": {"mean_iou": 0.5}}.get(name, {}).items():
        assert figures[metric][0] > least
    if name == "keypoints":
        with (RECIPES / name / "without_pairs.csv").open(newline="") as file:
            without = {row["metric"]: float(row["value"]) for row in csv.DictReader(file)}
        assert figures["pck"][0] > without["pck"] + 0.1
