"""experiments/extension: a package's own operator keeps the laws of stages, and trains and serves as cv2 warps."""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import gpuflow.serve
from gpuflow.config import read_config
from gpuflow.stages import STAGES
from gpuflow.vocabulary import stage_table
from tests.datasets import make_photos, python, write_config
from tests.images import photo
from tests.laws import test_stage_laws as laws

FOLDER = Path(__file__).parents[2] / "experiments" / "extension"
OF_ALL = [one.mark for one in (laws.every_example, laws.every_value, laws.every_stage)]
LAWS = {name: law for name, law in vars(laws).items() if any(mark in OF_ALL for mark in getattr(law, "pytestmark", ()))}
FIXED = {"own_warp": {"degrees": [15, 15], "scale": [0.9, 0.9]}}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package, as if it were installed, and its operator for the CPU, built anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("built")))
        yield importlib.import_module("own_warp")
    sys.modules.pop("own_warp")


def by_opencv(pixels: Any, matrix: Any) -> Any:
    size = pixels.shape[1::-1]
    return cv2.warpAffine(pixels, matrix, size, flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)


def test_there_are_laws() -> None:
    assert len(LAWS) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_it_keeps_the_laws_of_stages(package: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, law = package.OwnWarp.examples(), LAWS[name]
    monkeypatch.setitem(STAGES, "own_warp", package.OwnWarp)
    monkeypatch.setattr(laws, "ALL_EXAMPLES", (*laws.ALL_EXAMPLES, *examples))
    parameters = inspect.signature(law).parameters
    chunks = [{"chunk": chunk} for chunk in (1, 3)] if "chunk" in parameters else [{}]
    for value in ["own_warp"] if "name" in parameters else examples:
        for chunk in chunks:
            law(value, **chunk)


@pytest.mark.slow
def test_it_warps_as_opencv(package: Any) -> None:
    images = np.stack([photo(31, 43, seed=seed) for seed in range(4)])
    matrices = package.inverse_matrices(np.array([15, -30, 90, 0.0]), np.array([1, 0.8, 0.5, 1]), 31, 43)
    found = package.warp(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(matrices), "copy")
    for pixels, matrix, warped in zip(images, matrices, found.permute(0, 2, 3, 1).numpy(), strict=True):
        assert np.abs(by_opencv(pixels, matrix).astype(int) - warped).max() <= 1
    assert np.array_equal(found[3].permute(1, 2, 0).numpy(), images[3])


@pytest.mark.slow
def test_what_is_served_is_what_validation_loads(package: Any, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=1, each=3)
    stages = [{"decode": {}}, {"resize": {"height": 30, "width": 40}}, FIXED, {"normalize": {}}]
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos", val=stages, serve={"stages": stages})
    with gpuflow.load(config, "val") as loader:
        (batch,) = list(loader)
    files = sorted((tmp_path / "photos").rglob("*.jpg"))
    with gpuflow.serve.load(config, preprocess_only=True) as predict:
        for image, file in zip(batch[0], files, strict=True):
            assert torch.equal(predict.preprocess(file.read_bytes()), image)


@pytest.mark.slow
def test_the_operator_in_triton_gives_the_bits_of_cpp(package: Any) -> None:
    package.build("copy")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import json, numpy as np, torch, own_warp, own_warp_triton
from tests.images import photo
images = torch.from_numpy(np.stack([photo(31, 43, seed=seed) for seed in range(3)]))
matrices = own_warp.inverse_matrices(np.array([15, -30, 90.0]), np.array([1, 0.8, 0.5]), 31, 43)
found = own_warp_triton.warp(images, torch.from_numpy(matrices))
expected = own_warp.warp(images.permute(0, 3, 1, 2), torch.from_numpy(matrices), "copy").permute(0, 2, 3, 1)
print(json.dumps([list(found.shape), torch.equal(found, expected)]))
"""
    built = os.environ["TORCH_EXTENSIONS_DIR"]
    done = python(code, str(FOLDER), TRITON_INTERPRET="1", TORCH_EXTENSIONS_DIR=built)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[3, 31, 43, 3], True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize("kernel", ["triton", "copy", "cuda"])
def test_a_gpu_gives_the_bits_of_the_cpu(package: Any, kernel: str, tmp_path: Path) -> None:
    """With random numbers, as in training."""
    if kernel == "cuda" and shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    stages = [{"decode": {}}, {"center_crop": {"size": [31, 43]}}, {"own_warp": {"kernel": kernel}}]
    config = write_config(tmp_path / "x.yaml", tmp_path, train=stages)
    images = torch.from_numpy(np.stack([photo(31, 43, seed=seed) for seed in range(5)])).permute(0, 3, 1, 2)
    expected, found = (
        gpuflow.transform(config, device=device)(images.to(device), epoch=1, positions=range(5))
        for device in ("cpu", "cuda")
    )
    assert torch.equal(found.cpu(), expected)
    assert not torch.equal(expected, images)


def test_its_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a build: nothing runs."""
    monkeypatch.syspath_prepend(str(FOLDER))
    config = read_config(FOLDER / "pipeline.yaml", stage_table())
    served, trained = (config.programs[name].pipeline.stages[2] for name in ("serve", "train"))
    assert (served.random, trained.random) == (False, True)


@pytest.mark.slow
def test_a_run_measures_what_its_log_lacks(tmp_path: Path) -> None:
    options = ["--batch=3", "--threads=2", "--seconds=0.01", "--repeats=1", f"--out={tmp_path}"]
    done = [python(FOLDER / "run.py", "--arms", *arms, *options) for arms in (["cv2"], ["cv2", "gpuflow"])]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    assert [[line.split()[1] for line in one.stdout.splitlines()] for one in done] == [["cv2"], ["gpuflow"]]
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = {(row["arm"], row["metric"]): float(row["value"]) for row in csv.DictReader(file)}
    assert {arm for arm, _ in rows} == {"cv2", "gpuflow"}
    assert rows["gpuflow", "images_per_s"] > 0
    assert rows["cv2", "most_levels"] == 0 <= rows["gpuflow", "most_levels"] <= 1


@pytest.mark.slow
def test_an_arm_that_fails_is_named(tmp_path: Path) -> None:
    """As one does whose operator does not build."""
    options = ["--arms", "own-cpp", "--batch=2", "--repeats=1", "--seconds=0.01", f"--out={tmp_path}"]
    built = str(tmp_path / "built")
    done = python(FOLDER / "run.py", *options, TORCH_EXTENSIONS_DIR=built, CXX="no-such-compiler")
    assert done.returncode == 1
    assert "Not measured" in done.stderr and "own-cpp: " in done.stderr
