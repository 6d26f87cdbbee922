"""experiments/augment: what the arms run, the table of results, and the pictures of all stages."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpuflow
from gpuflow.stages import STAGES
from gpuflow.tools.bench import COLUMNS, row
from tests import images
from tests.experiments.scripts import imported

AUGMENT = Path(__file__).parents[2] / "experiments" / "augment"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(AUGMENT, ["run", "pictures"]) as modules:
        yield modules


@pytest.fixture
def photos() -> list[torch.Tensor]:
    return [torch.from_numpy(images.photo(60, 80, seed=seed)).permute(2, 0, 1) for seed in range(2)]


@pytest.mark.parametrize("recipe", ["timm", "view", "geometry"])
def test_arms_make_batches_of_the_recipe(recipe: str, scripts: dict[str, Any], photos: list[torch.Tensor]) -> None:
    run = scripts["run"]
    transforms = run.torchvision_transforms(recipe)
    names = [next(iter(stage)) for stage in stages(run.CONFIG, recipe)[1:]]
    assert len(transforms) == len(names)
    left_out = set[str]()
    for name in run.ON_CPU:
        try:
            arm = run.ARMS[name](recipe, torch.device("cpu"))
        except run.Missing:
            left_out.add(name)
            continue
        batch = arm(photos)
        assert batch.shape == (2, 3, 224, 224) and batch.dtype == torch.float32
        assert -2.5 < float(batch.min()) < float(batch.max()) < 2.8
    assert left_out <= {"kornia", "opencv"}
    own = gpuflow.transform(run.CONFIG, recipe)(photos, epoch=0, positions=range(2))
    assert torch.equal(run.of_gpuflow(recipe, torch.device("cpu"))(photos), own)


def stages(config: Path, recipe: str) -> list[dict[str, Any]]:
    import yaml

    found: list[dict[str, Any]] = yaml.safe_load(config.read_text())["pipelines"][recipe]["stages"]
    return found


def test_measuring_keeps_the_rows_of_other_arms(scripts: dict[str, Any], tmp_path: Path) -> None:
    run, out = scripts["run"], tmp_path / "results.csv"
    small = ["--batch", "2", "--repeats", "1", "--seconds", "0", "--recipes", "geometry", "--out", str(out)]
    for arms in (["gpuflow", "opencv"], ["opencv"], ["dali"]):
        run.main([*small, "--arms", *arms])
    rows = read(out)
    assert [row["arm"] for row in rows] == ["gpuflow", "opencv"]
    assert all(float(row["value"]) > 0 for row in rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == COLUMNS
    return rows


def test_rows_of_a_gpu_have_its_name(scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    rows = [row("gpuflow", "timm", "images_per_s", [2.0], "images/s")]
    for device, start in (("cpu", rows[0]["machine"]), ("cuda", f"NVIDIA H100, {rows[0]['machine']}")):
        scripts["run"].save(tmp_path / "results.csv", rows, torch.device(device))
        (saved,) = read(tmp_path / "results.csv")
        assert saved["machine"] == start


def test_the_results_have_every_recipe_and_the_arms_of_a_cpu(scripts: dict[str, Any]) -> None:
    found = {(row["arm"], row["workload"].split()[0]) for row in read(AUGMENT / "results.csv")}
    for recipe in scripts["run"].RECIPES:
        assert {("gpuflow", recipe), ("torchvision-loop", recipe)} <= found
    assert ("opencv", "geometry") in found


def test_every_stage_that_changes_images_has_pictures(scripts: dict[str, Any]) -> None:
    pictures = scripts["pictures"]
    found = pictures.picture_parameters()
    assert {*found, *pictures.WITHOUT} == set(STAGES)
    assert {len(magnitudes) for magnitudes in found.values()} == {1, 3}


@pytest.mark.slow
def test_pictures_have_both_forms(tmp_path: Path) -> None:
    out = tmp_path / "pictures.npz"
    command = [
        sys.executable,
        str(AUGMENT / "pictures.py"),
        str(out),
        "--side",
        "16",
        "--stages",
        "brightness",
        "mixup",
    ]
    subprocess.run(command, check=True, timeout=360, capture_output=True, cwd=AUGMENT.parents[1])
    with np.load(out) as file:
        assert json.loads(str(file["about"]))["stages"] == ["brightness", "mixup"]
        names = [name for name in file.files if name.endswith("/cpu")]
        assert len(names) == 6
        for name in names:
            both = file[name], file[name.removesuffix("cpu") + "gpu"]
            assert both[0].shape == (16, 16, 3)
            assert np.abs(np.subtract(*both, dtype=np.int16)).max() <= 1


@pytest.mark.slow
def test_the_hosts_work_is_measured_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "host.csv"
    command = [sys.executable, str(AUGMENT / "host.py"), "--recipes", "geometry", "--batch", "4"]
    subprocess.run([*command, "--measurements", "3", "--out", str(out)], check=True, timeout=300, capture_output=True)
    with out.open(newline="") as file:
        (found,) = csv.DictReader(file)
    assert (found["workload"], found["metric"], found["repeats"]) == ("geometry 224; batch=4", "host_ms", "3")
    assert 0 < float(found["low"]) <= float(found["value"]) <= float(found["high"])
