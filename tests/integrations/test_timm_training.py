"""`gpuflow train` with models of timm: trained, resumed, exported and served by name, from pretrained files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpuflow.config import Config, read_config
from gpuflow.engines.model_library import is_model, usual_sizes
from gpuflow.engines.pytorch import load_checkpoint
from gpuflow.errors import ConfigError
from gpuflow.stages import STAGES
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.datasets import make_photos, write_config

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.integrations
MODEL = "timm:test_resnet"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", classes=3, each=4)
    fit = {"model": MODEL, "epochs": 2, "lr": 0.01, "ema": 0.9, "out": str(tmp_path / "run")}
    stages = [{"decode": {}}, {"resize": {"height": 64, "width": 64}}, {"normalize": {}}]
    return write_config(tmp_path / "x.yaml", tmp_path / "photos", train=stages, val=stages, fit=fit)


def read(path: Path, *overrides: str) -> Config:
    return read_config(path, STAGES, overrides)


def test_a_model_of_timm_is_trained_resumed_and_loaded(config_file: Path) -> None:
    whole = Trainer(read(config_file), device="cpu")
    whole.run(TrainerEvents())
    Trainer(read(config_file), device="cpu", force=True).run(TrainerEvents(), max_steps=4)
    resumed = Trainer(read(config_file), device="cpu", resume=True)
    resumed.run(TrainerEvents())
    expected = whole.model.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in resumed.model.state_dict().items())
    served, info = load_checkpoint(str(resumed.checkpoint))
    assert info.classes == ("class_0", "class_1", "class_2")
    assert served(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


def test_weights_of_a_file_and_of_the_caches(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = timm.create_model("test_resnet", num_classes=1000).state_dict()
    torch.save(theirs, tmp_path / "a.pth")
    trainer = Trainer(read(config_file, f"train.pretrained={tmp_path / 'a.pth'}"), device="cpu")
    assert torch.equal(trainer.model.state_dict()["conv1.0.weight"], theirs["conv1.0.weight"])
    hub = pytest.importorskip("huggingface_hub")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ConfigError, match=r"no such file: .*/hub/models--timm--test_resnet.*/model.safetensors or "):
        Trainer(read(config_file, "train.pretrained=true"), device="cpu")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "a.pth"))
    trainer = Trainer(read(config_file, "train.pretrained=true"), device="cpu")
    assert torch.equal(trainer.model.state_dict()["conv1.0.weight"], theirs["conv1.0.weight"])


def test_names_and_sizes(config_file: Path) -> None:
    assert is_model(MODEL) and is_model("timm:resnet18.a1_in1k") and not is_model("timm:resnet81")
    assert usual_sizes(MODEL) == [160]
    with pytest.raises(ConfigError, match=r"train\.model is not a model of timm, got 'timm:resnet81'; did you mean"):
        Trainer(read(config_file, "train.model=timm:resnet81"), device="cpu")
    with pytest.raises(ConfigError, match=r"train\.model cannot be built: .*tag"):
        Trainer(read(config_file, "train.model=timm:resnet18.none"), device="cpu")
