"""Training: results, checkpoints, and a run that is interrupted at any step ends with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError, StateError
from gpuflow.runtime.ranks import Group, Ranks
from gpuflow.sources import Subset
from gpuflow.stages import STAGES
from gpuflow.training.trainer import PassResult, Trainer, TrainerEvents, _PassTotals
from tests.datasets import deadline, make_photos, nothing_left_behind, write_config

STEPS = 6
"""Two epochs of three steps."""


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with deadline(100):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trainer") / "photos"
    make_photos(root, classes=3, each=4)
    return root


@pytest.fixture
def config_file(photos: Path, tmp_path: Path) -> Path:
    fit = {"model": "squeezenet1_1", "epochs": 2, "lr": 0.01, "out": str(tmp_path / "run")}
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 32}}, {"normalize": {}}]
    val = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}}]
    return write_config(tmp_path / "x.yaml", photos, train=stages, val=val, fit=fit)


def read(path: Path, *overrides: str) -> Config:
    return read_config(path, STAGES, overrides)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Record(TrainerEvents):
    """What a trainer told."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int, int]] = []
        self.results: list[tuple[str, int, PassResult]] = []
        self.steps = 0

    def begin_pass(self, name: str, epoch: int, steps: int) -> None:
        self.passes.append((name, epoch, steps))

    def step(self, loss: float, images_per_s: float) -> None:
        self.steps += 1

    def end_pass(self, name: str, epoch: int, result: PassResult) -> None:
        self.results.append((name, epoch, result))


def test_a_run_trains_validates_and_saves(config_file: Path) -> None:
    with nothing_left_behind():
        trainer, record = Trainer(read(config_file), device="cpu"), Record()
        before = weights(trainer)
        result = trainer.run(record)
    assert record.passes == [("train", 0, 3), ("val", 0, 3), ("train", 1, 3), ("val", 1, 3)]
    assert record.steps == 12
    assert (trainer.step, trainer.epoch) == (STEPS, 1)
    assert result == record.results[-1][2]
    assert all(0 <= r.accuracy <= 1 and r.loss > 0 and r.images_per_s > 0 for _, _, r in record.results)
    assert not same(before, weights(trainer))
    state: dict[str, Any] = torch.load(trainer.checkpoint, weights_only=True)
    assert (state["version"], state["arch"], state["step"]) == (1, "squeezenet1_1", STEPS)
    assert state["classes"] == ["class_0", "class_1", "class_2"]
    assert state["preprocessing"] == read(config_file).programs["val"].pipeline.fingerprint
    assert state["train_preprocessing"] == read(config_file).programs["train"].pipeline.fingerprint
    assert (state["loader"]["epoch"], state["loader"]["position"]) == (2, 0)
    assert [path.name for path in trainer.checkpoint.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("model", ["resnet18", "squeezenet1_1"])
def test_resumed_at_any_step_ends_with_the_same_weights(model: str, config_file: Path) -> None:
    """resnet18 has batch statistics, squeezenet1_1 draws dropout from torch's generator."""
    at = range(1, STEPS) if model == "squeezenet1_1" else (2, 4)
    overrides = [f"train.model={model}"]
    whole = Trainer(read(config_file, *overrides), device="cpu")
    whole.run(TrainerEvents())
    for step in at:
        first = Trainer(read(config_file, *overrides, "run.threads=1"), device="cpu")
        first.run(TrainerEvents(), max_steps=step)
        assert first.step == step
        assert not same(weights(first), weights(whole))
        torch.manual_seed(99)  # another process has another generator
        second = Trainer(read(config_file, *overrides), device="cpu", resume=True)
        assert second.step == step
        second.run(TrainerEvents())
        assert same(weights(second), weights(whole)), f"interrupted after step {step}"


def test_a_finished_run_has_nothing_to_resume(config_file: Path) -> None:
    Trainer(read(config_file), device="cpu").run(TrainerEvents())
    again, record = Trainer(read(config_file), device="cpu", resume=True), Record()
    assert again.run(record) is None
    assert record.passes == []


def test_without_a_val_pipeline_there_is_no_validation(config_file: Path, tmp_path: Path) -> None:
    import yaml

    document = yaml.safe_load(config_file.read_text())
    del document["pipelines"]["val"]
    path = tmp_path / "y.yaml"
    path.write_text(yaml.safe_dump(document))
    trainer, record = Trainer(read(path), device="cpu"), Record()
    assert trainer.run(record, max_steps=3) is None
    assert record.passes == [("train", 0, 3)]
    assert trainer.preprocessing == trainer.train_loader.preprocessing


def test_the_source_is_indexed_once(config_file: Path) -> None:
    whole = Trainer(read(config_file), device="cpu")
    assert whole.val_loader is not None
    assert whole.train_loader.dataset is whole.val_loader.dataset
    split = Trainer(read(config_file, "source.split={train: 0.5, val: 0.5}"), device="cpu")
    assert split.val_loader is not None
    train, val = split.train_loader.dataset, split.val_loader.dataset
    assert isinstance(train, Subset) and isinstance(val, Subset)
    assert train.source is val.source
    assert (len(train), len(val)) == (6, 6)


def test_sums_stay_on_the_device_and_are_read_now_and_then() -> None:
    totals = _PassTotals(torch.device("cpu"), world_size=2)
    totals.add(torch.tensor(6.0), torch.tensor(1), 4)
    loss, images_per_s = totals.so_far()
    assert loss == 1.5
    assert images_per_s > 0
    totals.add(torch.tensor(3.0), torch.tensor(1), torch.tensor(2))
    assert totals.so_far() == (loss, images_per_s), "half a second is not over"
    totals._next_read = 0.0
    totals.add(torch.tensor(9.0), torch.tensor(0), torch.tensor(0))
    assert totals.so_far()[0] == 3.0
    result = totals.result(Group(Ranks(), torch.device("cpu")))
    assert (result.loss, result.accuracy) == (3.0, 2 / 6)


def test_an_unknown_model_is_located(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(read(config_file, "train.model=resnet81"), device="cpu")
    assert str(caught.value) == (
        f"{config_file}: train.model is not a torchvision classification model, got 'resnet81'; "
        "did you mean 'resnet18'?"
    )


def test_there_must_be_a_checkpoint_to_resume(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError) as caught:
        Trainer(read(config_file), device="cpu", resume=True)
    assert str(caught.value) == f"{tmp_path}/run/last.pt: no checkpoint to resume; train without --resume first"


def test_refuses_a_checkpoint_of_something_else(config_file: Path, tmp_path: Path) -> None:
    trainer = Trainer(read(config_file), device="cpu")
    trainer.run(TrainerEvents(), max_steps=1)
    place = f"{tmp_path}/run/last.pt"
    with pytest.raises(StateError) as caught:
        Trainer(read(config_file, "train.model=resnet18"), device="cpu", resume=True)
    assert str(caught.value) == (
        f"{place}: was trained with arch squeezenet1_1, the configuration says resnet18; "
        "restore the configuration or set another train.out"
    )
    with pytest.raises(StateError) as caught:
        Trainer(read(config_file, "pipelines.val.stages.resize.shorter=40"), device="cpu", resume=True)
    ours = read(config_file, "pipelines.val.stages.resize.shorter=40").programs["val"].pipeline.fingerprint
    assert str(caught.value) == (
        f"{place}: was trained with preprocessing {trainer.preprocessing}, the configuration's is {ours}; "
        "restore the stages or set another train.out"
    )
    with pytest.raises(StateError, match=r"^the state was taken with seed 0 and configuration"):
        Trainer(read(config_file, "pipelines.train.stages.random_resized_crop.ratio=[1, 1]"), device="cpu", resume=True)


class Unwritable:
    """A value of a checkpoint whose writing fails."""

    def __reduce__(self) -> str:
        raise OSError("disk full")


def test_a_checkpoint_is_whole_or_not_at_all(config_file: Path) -> None:
    trainer = Trainer(read(config_file), device="cpu")
    trainer.run(TrainerEvents(), max_steps=1)
    before = trainer.checkpoint.read_bytes()
    trainer.preprocessing = Unwritable()  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk full"):
        trainer.save()
    assert trainer.checkpoint.read_bytes() == before
    assert [path.name for path in trainer.checkpoint.parent.iterdir()] == ["last.pt"]
