"""experiments/worker_scaling: its arms load every photograph, what is measured is not measured again."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from plots import worker_scaling
from tests.datasets import make_photos
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "worker_scaling"
PHOTOGRAPHS = 24


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(HERE, ["run", "arms"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder / "same")
    return folder


def job(folder: Path, arm: str, recipe: str = "base") -> dict[str, Any]:
    place = {"folder": str(folder / "same"), "photographs": PHOTOGRAPHS}
    return {"arm": arm, "recipe": recipe, "workers": 2, "epochs": 2, **place}


@pytest.mark.slow
def test_every_arm_loads_every_photograph_in_each_epoch(scripts: dict[str, Any], photos: Path) -> None:
    for arm, build in scripts["arms"].LOADERS.items():
        loader = build(job(photos, arm))()
        assert [sum(loader), sum(loader)] == [PHOTOGRAPHS] * 2, arm


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["gpuflow", "processes", "gpuflow+spinner", "dataloader-tensors"])
def test_an_arm_prints_metrics_of_the_table(arm: str, scripts: dict[str, Any], photos: Path) -> None:
    command = [sys.executable, str(HERE / "arms.py"), json.dumps(job(photos, arm))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    metrics = json.loads(done.stdout)
    assert set(metrics) <= set(scripts["run"].UNITS)
    cpu = metrics.pop("cpu_ms_per_image", 0)  # counted in ticks of 10 ms, fewer than one for a few small photographs
    assert cpu >= 0 and all(value > 0 for value in metrics.values()) and len(metrics) >= 2


def test_recipes_are_pipelines_with_transforms_of_torchvision(scripts: dict[str, Any]) -> None:
    recipes = scripts["run"].RECIPES
    assert set(yaml.safe_load((HERE / "photos.yaml").read_text())["pipelines"]) == set(recipes)
    for recipe in recipes:
        made = scripts["arms"].transform_of(recipe)(Image.new("RGB", (300, 200)))
        views = made if recipe == "two_views" else [made]
        assert [view.shape for view in views] == [(3, 224, 224)] * (2 if recipe == "two_views" else 1)


def test_most_workers_come_first_and_arms_without_a_recipe_are_left_out(scripts: dict[str, Any]) -> None:
    run = scripts["run"]
    arguments = ["--workers", "1", "2", "--kinds", "web", "--recipes", "base", "rotate", "--repeats", "1"]
    jobs = run.jobs_of(run.parsed([*arguments, "--count", "1000", "--arms", "gpuflow", "decode", "gpuflow default"]))
    found = [(one.recipe, one.arm, one.workers, one.photographs) for one in jobs]
    assert found == [
        ("base", "gpuflow", 2, 500),
        ("base", "decode", 2, 500),
        ("base", "gpuflow default", 2, 500),
        ("rotate", "gpuflow", 2, 500),
        ("rotate", "gpuflow default", 2, 500),
        ("base", "gpuflow", 1, 250),
        ("rotate", "gpuflow", 1, 250),
        ("base", "decode", 1, 250),
    ]


def test_what_is_measured_is_not_measured_again(
    scripts: dict[str, Any], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call measures the job that failed alone; fewer workers get evenly chosen photographs."""
    run, asked = scripts["run"], []

    def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(json.loads(command[-1]))
        if len(asked) == 2:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 0, json.dumps({"images_per_s": 1000 * asked[-1]["workers"]}))

    monkeypatch.setattr(run.subprocess, "run", start)
    for name, value in {"machine": "here", "versions": "some", "commit": "abc"}.items():
        monkeypatch.setattr(run, name, lambda value=value: value)
    arguments = ["--kinds", "same", "--arms", "gpuflow", "--workers", "1", "4", "8", "--repeats", "1"]
    arguments += ["--count", str(PHOTOGRAPHS), "--photos", str(photos), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit, match="Failed; the same command measures the rest"):
        run.main()
    run.main()
    assert [one["workers"] for one in asked] == [8, 4, 1, 4]
    assert len(list(Path(asked[2]["folder"]).glob("*/*"))) == asked[2]["photographs"] == PHOTOGRAPHS // 4
    with (tmp_path / "results.csv").open(newline="") as file:
        rates = {row["workload"]: row["value"] for row in csv.DictReader(file) if row["metric"] == "images_per_s"}
    workload = "same: random_resized_crop 224, flip, normalize; batch=128; workers="
    assert rates == {f"{workload}8": "8000", f"{workload}1": "1000", f"{workload}4": "4000"}
    svg, _ = worker_scaling.draw(tmp_path / "results.csv", tmp_path / "figure")
    assert "gpuflow  8,000" in svg.read_text()
