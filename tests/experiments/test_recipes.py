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
from tests.datasets import deadline, make_photos
from tests.experiments.scripts import imported

ROOT = Path(__file__).parents[2]
CLASSIFICATION = ROOT / "experiments" / "recipes" / "classification"
SMALL: dict[str, Any] = {"size": 32, "batch": 4, "epochs": 1}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with deadline(300):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with imported(CLASSIFICATION, ["run"]) as modules:
        yield modules["run"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe") / "photos"
    make_photos(folder, classes=2, each=10)
    return folder


def test_classification_trains_and_validates(run: Any, photos: Path) -> None:
    rows = run.train(photos, **SMALL, device="cpu")
    assert [row["pass"] for row in rows] == ["train", "val"]
    assert all(math.isfinite(row["loss"]) and 0 <= row["accuracy"] <= 1 for row in rows)


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


def test_the_results_of_classification_are_those_of_its_command() -> None:
    with (CLASSIFICATION / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["pass"], row["epoch"]) for row in rows] == [(n, str(e)) for e in range(4) for n in ("train", "val")]
    assert float(rows[-1]["accuracy"]) > 5 / 15
