"""experiments/consistency: a pair of gpuflow loses nothing, and what is measured is not measured again."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from plots import consistency
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "consistency"
ARGUMENTS = ["--tasks", "hairlines", "--seeds", "2", "--count", "24", "--test-count", "12"]
ARGUMENTS += ["--train", "cpu decode", "gpuflow"]
DIFFERENCES = {"recall_difference", "precision_difference", "flips", "logit_distance"}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(HERE, ["run", "ways", "models", "images", "photos"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def out(scripts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("consistency")
    scripts["run"].main([*ARGUMENTS, "--images", str(folder / "images"), "--out", str(folder)])
    return folder


def differences(path: Path, serve: str, train: str) -> dict[str, set[float]]:
    """Return all values and ends of intervals of the metrics that compare a service with the training's own way."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["arm"] == serve and f"; train={train};" in row["workload"]]
    return {
        metric: {float(row[side]) for row in rows if row["metric"] == metric for side in ("value", "low", "high")}
        for metric in DIFFERENCES
    }


@pytest.mark.slow
def test_services_that_read_the_file_of_the_training_differ_in_nothing(out: Path) -> None:
    results = out / "results.csv"
    for way in ("gpuflow", "cpu decode"):
        assert differences(results, way, way) == {metric: {0.0} for metric in DIFFERENCES}
    assert min(differences(results, "gpu decode (emulated)", "gpuflow")["logit_distance"]) != 0.0
    # The levels are equal; another formula normalizes them.
    opencv = differences(results, "opencv", "cpu decode")["logit_distance"]
    assert max(opencv) < 1e-4 < max(differences(results, "opencv", "gpuflow")["logit_distance"])


def test_the_committed_rows_of_gpuflow_pairs_are_zero() -> None:
    assert differences(HERE / "results.csv", "gpuflow", "gpuflow") == {metric: {0.0} for metric in DIFFERENCES}


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(
    scripts: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call gets only the jobs that the log lacks, and the figure shows all ways."""
    log = out / "measurements.jsonl"
    asked: list[dict[str, Any]] = []
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))

    def measured(jobs: list[dict[str, Any]], options: object) -> list[dict[str, Any]]:
        asked.extend(jobs)
        return []

    monkeypatch.setattr(scripts["run"], "measured", measured)
    scripts["run"].main([*ARGUMENTS, "--images", str(out / "images"), "--out", str(out)])
    assert [(job["task"], job["seed"], job["train"]) for job in asked] == [("hairlines", 1, "gpuflow")]
    svg, _ = consistency.draw(out / "results.csv", out / "figure")
    assert svg.stat().st_size > 0


def test_an_interval_is_that_of_student(scripts: dict[str, Any]) -> None:
    found = scripts["run"].interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [float(found[name]) for name in ("value", "low", "high")] == pytest.approx([3, 1.0368, 4.9632], abs=1e-3)


def test_quality_is_of_class_1_or_the_mean_of_all_classes(scripts: dict[str, Any]) -> None:
    quality = scripts["run"]._quality
    assert quality(torch.tensor([1, 0, 1, 0]), torch.tensor([1, 1, 0, 0])) == (50.0, 50.0)
    several = quality(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 2, 2]))
    assert several == pytest.approx((200 / 3, (100 + 100 / 3) / 3))


def test_marks_keep_the_luma_of_the_background(scripts: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    changes = np.stack([scripts["images"]._change_of_hue(rng) for _ in range(20)])
    assert np.abs(changes @ [0.299, 0.587, 0.114]).max() < 1e-4 < np.abs(changes).min(0).max()


def test_the_emulated_decoder_repeats_chroma(scripts: dict[str, Any]) -> None:
    """Two colours that meet between two blocks of chroma stay two; interpolation of chroma makes others."""
    pixels = np.full((32, 32, 3), (200, 90, 60), np.uint8)
    pixels[:, 16:] = (60, 90, 200)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=95, subsampling="4:2:0")
    repeated = scripts["ways"].repeated_chroma(encoded.getvalue())
    interpolated = np.asarray(Image.open(encoded))
    assert [len(np.unique(image.reshape(-1, 3), axis=0)) for image in (repeated, interpolated)] == [2, 4]
