"""experiments/worker_scaling: its arms load every photograph, what is measured is not measured again."""

from __future__ import annotations

import csv
import importlib.machinery
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from plots import lines
from tests.datasets import make_photos
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "worker_scaling"
PHOTOGRAPHS = 24
ARMS = ("dataloader-pil", "dataloader-tensors", "gpuflow", "spdl-cv2", "dali-cpu")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(HERE, ["run", "arms"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder / "same")
    return folder


def job(folder: Path, arm: str, *workloads: str) -> dict[str, Any]:
    place = {"folder": str(folder / "same"), "photographs": PHOTOGRAPHS}
    return {"arm": arm, "workloads": workloads, "workers": 2, "epochs": 2, "seconds": 0.2, **place}


@pytest.mark.slow
def test_every_arm_loads_every_photograph_in_each_epoch(scripts: dict[str, Any], photos: Path) -> None:
    run, arms = scripts["run"], scripts["arms"]
    for arm, build in arms.LOADERS.items():
        if arm in run.RECIPE_ARMS:
            loader = arms.Counted(build(job(photos, arm), "base")())
            assert [sum(loader), sum(loader)] == [PHOTOGRAPHS] * 2, arm


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_arms_of_the_four_workloads_stretch_the_same_image(arm: str, scripts: dict[str, Any], tmp_path: Path) -> None:
    """Every photograph is the same, so its batches are compared whole. OpenCV resizes without antialiasing."""
    run, arms = scripts["run"], scripts["arms"]
    if reason := run.reason_against(arm):
        pytest.skip(reason)
    y, x = np.mgrid[:333, :500]
    waves = np.stack([127 + 120 * np.sin(x / 20), 127 + 120 * np.cos(y / 15), 127 + 120 * np.sin((x + y) / 30)], axis=2)
    folder = tmp_path / "same" / "class_00"
    folder.mkdir(parents=True)
    Image.fromarray(waves.astype(np.uint8)).save(folder / "0.jpg", quality=95)
    for number in range(1, 64):
        os.link(folder / "0.jpg", folder / f"{number}.jpg")
    with Image.open(folder / "0.jpg") as image:
        pixels = (
            torch.from_numpy(np.array(image.resize((224, 224), Image.Resampling.BILINEAR))).permute(2, 0, 1).float()
        )
    mean, std = (torch.tensor(values)[:, None, None] for values in (arms.MEAN, arms.STD))
    for workload in ("decode", "batch", "normalize"):
        images, labels = next(iter(arms.LOADERS[arm](job(tmp_path, arm), workload)()))
        expected = (pixels / 255 - mean) / std if workload == "normalize" else pixels
        assert images.dtype == (torch.float32 if workload == "normalize" else torch.uint8)
        assert images.shape[-3:] == (3, 224, 224) and (images.ndim == 3 or len(images) == len(labels))
        assert workload == "decode" or len(images) == 32
        distance = (images.float() - expected).abs() * (255 * std if workload == "normalize" else 1)
        assert distance.mean() < (2 if arm == "spdl-cv2" else 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "workloads"),
    [
        *((arm, ["base"]) for arm in ("gpuflow", "processes", "gpuflow+spinner", "dataloader-tensors")),
        *((arm, ["decode", "batch", "normalize"]) for arm in ("gpuflow", "dataloader-pil", "spdl-cv2")),
    ],
)
def test_an_arm_prints_metrics_of_the_table(
    arm: str, workloads: list[str], scripts: dict[str, Any], photos: Path
) -> None:
    command = [sys.executable, str(HERE / "arms.py"), json.dumps(job(photos, arm, *workloads))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert list(found) == workloads
    for metrics in found.values():
        assert set(metrics) <= set(scripts["run"].UNITS)
        cpu = metrics.pop("cpu_ms_per_image", 0)  # counted in ticks of 10 ms, fewer than one for small photographs
        assert cpu >= 0 and all(value > 0 for value in metrics.values()) and len(metrics) >= 2


def test_an_arm_that_leaves_out_every_photograph_is_an_error(scripts: dict[str, Any]) -> None:
    counts = scripts["arms"].endless([32, 8])
    assert [next(counts) for _ in range(3)] == [32, 8, 32]
    with pytest.raises(RuntimeError, match="has no photographs"):
        next(scripts["arms"].endless([]))


def test_workloads_are_pipelines_and_recipes_have_transforms_of_torchvision(scripts: dict[str, Any]) -> None:
    run, arms = scripts["run"], scripts["arms"]
    assert set(yaml.safe_load((HERE / "photos.yaml").read_text())["pipelines"]) == {*arms.FOUR, *run.RECIPES}
    for recipe in run.RECIPES:
        made = arms.transform_of(recipe)(Image.new("RGB", (300, 200)))
        views = made if recipe == "two_views" else [made]
        assert [view.shape for view in views] == [(3, 224, 224)] * (2 if recipe == "two_views" else 1)


def test_most_workers_come_first_and_arms_without_a_recipe_are_left_out(scripts: dict[str, Any]) -> None:
    run = scripts["run"]
    arguments = ["--workers", "1", "2", "--kinds", "web", "--workloads", "base", "rotate", "--repeats", "1"]
    jobs = run.jobs_of(run.parsed([*arguments, "--count", "1000", "--arms", "gpuflow", "decode", "dali-cpu"]))
    assert [(*one.workloads, one.arm, one.workers, one.photographs) for one in jobs] == [
        ("base", "gpuflow", 2, 500),
        ("base", "decode", 2, 500),
        ("base", "gpuflow", 1, 250),
        ("base", "decode", 1, 250),
        ("rotate", "gpuflow", 2, 500),
        ("rotate", "gpuflow", 1, 250),
    ]


def test_a_process_has_all_four_workloads_and_arms_take_turns(scripts: dict[str, Any]) -> None:
    run = scripts["run"]
    jobs = run.jobs_of(run.parsed(["--arms", "gpuflow", "dali-cpu", "processes", "--repeats", "2"]))
    assert {(one.workloads, one.photographs) for one in jobs} == {(scripts["arms"].FOUR, 16 * 4500)}
    found = [(one.arm, one.workers) for one in jobs]
    assert found[:3] == [("gpuflow", 32), ("gpuflow", 16), ("dali-cpu", 16)]
    assert found[9:12] == [("gpuflow", 32), ("dali-cpu", 16), ("gpuflow", 16)]
    assert [workers for arm, workers in found[:9] if arm == "gpuflow"] == [32, 16, 8, 4, 2, 1]


def test_libraries_of_pyav_are_found_by_names_without_their_hashes(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, links = scripts["run"], tmp_path / "links"
    links.mkdir()
    (tmp_path / "av.libs").mkdir()
    names = ["libavutil-5809ad29.so.60.26.102", "libswscale-88e9f973.so.9.5.102", "libvpl-e4e9cae8.so.2.16"]
    for name in names:
        (tmp_path / "av.libs" / name).touch()
    spec = importlib.machinery.ModuleSpec("av", None, origin=str(tmp_path / "av" / "__init__.py"))
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    found = run.ffmpeg_environment(links)
    assert {link.name: link.resolve().name for link in links.iterdir()} == {
        "libavutil.so.60": names[0],
        "libswscale.so.9": names[1],
    }
    assert found["LD_LIBRARY_PATH"] == f"{links}:{tmp_path / 'av.libs'}:/before"


@pytest.mark.parametrize(
    ("options", "workloads", "metric"),
    [
        (["--workloads", "base"], ["base"], "same: random_resized_crop 224, flip, normalize; batch=128; workers={}"),
        ([], ["decode", "batch", "normalize"], "normalize: same; workers={}"),
    ],
    ids=["recipe", "four"],
)
def test_what_is_measured_is_not_measured_again(
    options: list[str],
    workloads: list[str],
    metric: str,
    scripts: dict[str, Any],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second call measures the process that failed alone; an epoch has evenly chosen photographs."""
    run, asked = scripts["run"], []

    def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(json.loads(command[-1]))
        if len(asked) == 2:
            raise subprocess.CalledProcessError(1, command)
        metrics = {"images_per_s": 1000 * asked[-1]["workers"]}
        return subprocess.CompletedProcess(command, 0, json.dumps(dict.fromkeys(asked[-1]["workloads"], metrics)))

    monkeypatch.setattr(run.subprocess, "run", start)
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    for name, value in {"machine": "here", "versions": "some", "commit": "abc"}.items():
        monkeypatch.setattr(run, name, lambda value=value: value)
    arguments = ["--kinds", "same", "--arms", "gpuflow", "gpuflow-gpu", "--workers", "1", "4", "8", "--repeats", "1"]
    arguments += ["--count", str(PHOTOGRAPHS), "--photos", str(photos), "--out", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit, match="Failed; the same command measures the rest"):
        run.main()
    run.main()
    assert [(one["workers"], one["workloads"]) for one in asked] == [(count, workloads) for count in (8, 4, 1, 4)]
    epoch = PHOTOGRAPHS // 4 if options else 16 * PHOTOGRAPHS
    found = list(Path(asked[2]["folder"]).glob("*/*"))
    assert len(found) == asked[2]["photographs"] == epoch
    assert len({file.stat().st_ino for file in found}) == min(epoch, PHOTOGRAPHS)
    with (tmp_path / ("results.csv" if options else "workloads.csv")).open(newline="") as file:
        rates = {row["workload"]: row["value"] for row in csv.DictReader(file) if row["metric"] == "images_per_s"}
    assert len(rates) == 3 * len(workloads)
    assert [rates[metric.format(count)] for count in (8, 1, 4)] == ["8000", "1000", "4000"]
    printed = capsys.readouterr().out
    assert "left out: gpuflow-gpu: it needs a GPU" in printed
    assert ("left out: transfer: this workload needs a GPU" in printed) == (not options)
    if options:
        svg, _ = lines.worker_scaling(tmp_path / "results.csv", tmp_path / "figure")
        assert "gpuflow  8,000" in svg.read_text()
