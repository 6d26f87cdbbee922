"""`gpuflow.save_checkpoint`: what a user's training loop writes is served, exported and resumed as gpuflow's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

import gpuflow
import gpuflow.serve
from gpuflow.config import Config, read_config
from gpuflow.engines import read_info
from gpuflow.errors import ConfigError
from gpuflow.parity.study import study
from gpuflow.serve.export import export_model
from gpuflow.stages import STAGES
from tests.datasets import make_photos, write_config

ARCH = "squeezenet1_1"
STAGES_VAL = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}}]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    make_photos(root / "photos", classes=3, each=2)
    serve = {"stages": STAGES_VAL, "model": {"file": str(root / "own.pt"), "instances": 1}}
    return write_config(root / "x.yaml", root / "photos", val=STAGES_VAL, serve=serve)


def read(config: Path) -> Config:
    return read_config(config, STAGES)


def test_the_checkpoint_of_a_loop_of_ones_own_is_served(config: Path) -> None:
    model = models.squeezenet1_1(num_classes=3).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = config.parent / "own.pt"
    with gpuflow.load(config, "train") as train, gpuflow.load(config, "val") as val:
        next(iter(train))
        gpuflow.save_checkpoint(path, model, arch=ARCH, loader=train, val=val, optimizer=optimizer, step=7)
        state = torch.load(path, weights_only=True)
        assert (state["step"], state["loader"]) == (7, train.state_dict())
        assert state["train_preprocessing"] == train.preprocessing
        assert state["optimizer"]["param_groups"][0]["lr"] == 0.1
    program = read(config).programs["val"]
    info = read_info(str(path))
    assert info.classes == ("class_0", "class_1", "class_2")
    assert (info.preprocessing, info.stages) == (program.pipeline.fingerprint, program.pipeline.lines)
    photo = next((config.parent / "photos").rglob("*.jpg"))
    with gpuflow.serve.load(config) as predict, torch.inference_mode():
        image = predict.preprocess(photo)
        torch.testing.assert_close(predict(photo), model(image[None])[0], rtol=0, atol=1e-4)
        assert predict.classes == info.classes


@pytest.fixture
def other_classes(config: Path, tmp_path: Path) -> list[str]:
    """Overrides that read the photographs of two of the three classes from a listing."""
    files = sorted((config.parent / "photos").rglob("*.jpg"))
    rows = [f"{file},{file.parent.name}\n" for file in files if file.parent.name != "class_0"]
    (tmp_path / "two.csv").write_text("path,label\n" + "".join(rows))
    return [f"source={{listing: {tmp_path / 'two.csv'}}}"]


DIFFERENCE = (
    "got 2 where 3 are wanted, and class 0 is 'class_1' in place of 'class_0'; name all in each source: classes"
)


def test_loaders_whose_classes_differ_are_refused(config: Path, other_classes: list[str], tmp_path: Path) -> None:
    model = models.squeezenet1_1(num_classes=3)
    named = other_classes[0].replace("}", ", classes: [class_0, class_1, class_2]}")
    with gpuflow.load(config, "train") as train:
        with (
            gpuflow.load(config, "val", overrides=other_classes) as val,
            pytest.raises(ValueError, match="^" + re.escape(f"val must have the classes of loader, {DIFFERENCE}")),
        ):
            gpuflow.save_checkpoint(tmp_path / "m.pt", model, arch=ARCH, loader=train, val=val)
        assert not (tmp_path / "m.pt").exists()
        with gpuflow.load(config, "val", overrides=[named]) as val:
            gpuflow.save_checkpoint(tmp_path / "m.pt", model, arch=ARCH, loader=train, val=val)


def test_a_model_meets_no_source_of_other_classes(config: Path, other_classes: list[str], tmp_path: Path) -> None:
    with gpuflow.load(config, "val") as val:
        model = models.squeezenet1_1(num_classes=3).eval()
        gpuflow.save_checkpoint(tmp_path / "m.pt", model, arch=ARCH, loader=val)
    other = read_config(config, STAGES, other_classes)
    with pytest.raises(ConfigError, match=re.escape(f"source must have the checkpoint's classes, {DIFFERENCE}")):
        export_model(other, tmp_path / "m.pt2", checkpoint=tmp_path / "m.pt")
    assert not (tmp_path / "m.pt2").exists()
    with pytest.raises(ConfigError, match=re.escape(f"source must have the model's classes, {DIFFERENCE}")):
        study(other, "val", count=2, model=tmp_path / "m.pt")


def test_without_val_the_preprocessing_is_that_of_training(config: Path, tmp_path: Path) -> None:
    model = nn.DataParallel(models.squeezenet1_1(num_classes=3))
    with gpuflow.load(config, "val") as loader:
        gpuflow.save_checkpoint(tmp_path / "x.pt", model, arch=ARCH, loader=loader)
        assert read_info(str(tmp_path / "x.pt")).preprocessing == loader.preprocessing
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert state["optimizer"] is None
    assert set(state["model"]) == set(model.module.state_dict()), "the weights of the model inside"


def test_what_could_not_be_served_is_refused_when_it_is_saved(config: Path, tmp_path: Path) -> None:
    model = models.squeezenet1_1(num_classes=4)
    with gpuflow.load(config, "val") as loader:
        with pytest.raises(
            ValueError,
            match=r"arch must be .* of torchvision, or timm:NAME, got 'squeezenet'; did you mean 'squeezenet1_",
        ):
            gpuflow.save_checkpoint(tmp_path / "x.pt", model, arch="squeezenet", loader=loader)
        with pytest.raises(
            ValueError, match=r"weights of squeezenet1_1 for 3 classes, but for classifier\.1\.bias it has"
        ):
            gpuflow.save_checkpoint(tmp_path / "x.pt", model, arch=ARCH, loader=loader)
        with pytest.raises(OSError, match="No such file"):
            gpuflow.save_checkpoint(
                tmp_path / "nowhere" / "x.pt", models.squeezenet1_1(num_classes=3), arch=ARCH, loader=loader
            )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (nn.Sequential(models.squeezenet1_1(num_classes=3)), "for 0.classifier.1.bias it has (3,) in place of nothing"),
        (nn.Sequential(), "for classifier.1.bias it has nothing in place of (3,)"),
    ],
)
def test_the_weights_of_another_model(model: nn.Module, fault: str, config: Path, tmp_path: Path) -> None:
    action = "name its own arch, or save its weights and loader.state_dict() with torch.save, and serve it as .pt2"
    message = re.escape(f"model must have the weights of {ARCH} for 3 classes, but {fault}; {action}")
    with gpuflow.load(config, "train") as loader, pytest.raises(ValueError, match=message):
        gpuflow.save_checkpoint(tmp_path / "x.pt", model, arch=ARCH, loader=loader)


def test_what_torch_would_not_read_is_refused_and_the_file_before_stays(config: Path, tmp_path: Path) -> None:
    path, model = tmp_path / "x.pt", models.squeezenet1_1(num_classes=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuflow.load(config, "val") as loader:

        def save(**more: Any) -> None:
            gpuflow.save_checkpoint(path, model, arch=ARCH, loader=loader, optimizer=optimizer, **more)

        save(step=1, history=[0.5], best={"loss": torch.ones(1)})
        written = path.read_bytes()
        with pytest.raises(ValueError, match=r"^accuracy, paths must be numbers, strings, .* convert them, as by"):
            save(step=2, accuracy=np.float64(0.5), paths=[tmp_path])
        with pytest.raises(ValueError, match=r"must not have the names of gpuflow's own, got classes, version$"):
            save(version="mine", classes=5)
        optimizer.param_groups[0]["lr"] = np.float64(0.1)
        with pytest.raises(ValueError, match=r"^optimizer must be numbers"):
            save()
    assert path.read_bytes() == written and [one.name for one in tmp_path.iterdir()] == ["x.pt"]


def test_a_model_whose_shapes_are_computed_is_saved(config: Path, tmp_path: Path) -> None:
    """RegNet computes its widths with tensors, which must have values."""
    with gpuflow.load(config, "val") as loader:
        model = models.regnet_x_400mf(num_classes=3)
        gpuflow.save_checkpoint(tmp_path / "own.pt", model, arch="regnet_x_400mf", loader=loader)
    assert read_info(str(tmp_path / "own.pt")).classes == tuple(loader.classes)
