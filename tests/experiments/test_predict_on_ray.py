"""experiments/predict_on_ray: its model predicts without Ray, and a row of results is the median of its repeats."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.datasets import make_photos
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "predict_on_ray"


@pytest.fixture(scope="module")
def run() -> Any:
    with imported(HERE, ["run"]) as modules:
        yield modules["run"]


@pytest.mark.skipif(sys.platform != "linux", reason="taskset")
def test_the_arm_without_ray_predicts_each_photograph(run: Any, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=2, each=3)
    run.save_model("resnet18", tmp_path / "resnet18.pt2")
    assert run.measured("without Ray", tmp_path / "photos", tmp_path / "resnet18.pt2", cores=1) > 0
    assert run.model_alone("resnet18", cores=1) > 0


def test_results_have_the_median_and_the_ratio_to_the_run_without_ray(run: Any) -> None:
    same = {"workload": "w", "machine": "", "versions": "", "commit": "", "date": ""}
    speeds = {"without Ray": [10.0, 30.0, 20.0], "two nodes": [34.0, 36.0, 32.0]}
    records = [
        {"arm": arm, "repeat": repeat, "images_per_s": speed, **same}
        for arm, found in speeds.items()
        for repeat, speed in enumerate(found)
    ]
    rows = {(row["arm"], row["metric"]): (row["value"], row["low"], row["high"]) for row in run.rows_of(records)}
    assert rows["two nodes", "images_per_s"] == ("34.000", "32.000", "36.000")
    assert rows["two nodes", "ratio"] == ("1.700", "1.600", "1.800")
