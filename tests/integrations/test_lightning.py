"""A Lightning trainer on a DataModule: fit, validate, test and predict; killed and resumed at any step; ranks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuflow.errors import ConfigError, StateError, TooManyBadSamples
from tests.datasets import nothing_left_behind
from tests.integrations.killing import make_data, run, steps, weights_equal

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from gpuflow.integrations.lightning import DataModule  # noqa: E402

SCRIPT = Path(__file__).with_name("lightning_script.py")
EPOCHS = 3


WHOLE: dict[tuple[str, ...], Path] = {}
"""By options: the folder of an uninterrupted run."""


def whole(options: tuple[str, ...], factory: pytest.TempPathFactory) -> Path:
    if options not in WHOLE:
        WHOLE[options] = factory.mktemp("whole")
        make_data(WHOLE[options])
        run(SCRIPT, WHOLE[options], WHOLE[options] / "all.jsonl", str(EPOCHS), *options)
    return WHOLE[options]


@pytest.mark.parametrize(
    ("kill_at", "options"),
    [
        (3, ()),
        (8, ()),  # the checkpoint is of the epoch's last step
        (13, ()),
        (7, ("limit=5",)),
        (6, ("limit=5", "every=5")),  # of the last step of an epoch that the trainer cuts short
    ],
)
def test_a_killed_run_goes_on_with_the_next_step(
    kill_at: int, options: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = steps(whole(options, tmp_path_factory) / "all.jsonl")
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "killed.jsonl", str(EPOCHS), *options, kill_at=kill_at)
    run(SCRIPT, tmp_path, tmp_path / "resumed.jsonl", str(EPOCHS), *options, "resume")
    resumed = steps(tmp_path / "resumed.jsonl")
    kept = len(expected) - len(resumed)
    assert kill_at - int(dict([["every", "2"], *(o.split("=") for o in options)])["every"]) < kept <= kill_at
    assert steps(tmp_path / "killed.jsonl")[:kept] + resumed == expected
    assert [step["of_loader"] for step in expected] == [step["epoch"] for step in expected]
    assert weights_equal(WHOLE[options] / "all.pt", tmp_path / "resumed.pt")


@pytest.mark.parametrize(
    ("number", "after"),
    [(signal.SIGUSR1, 3), (signal.SIGTERM, 4), (signal.SIGUSR1, 7)],  # 7: the checkpoint is of the epoch's last step
)
def test_a_signal_saves_after_the_next_step_exits_75_and_the_run_goes_on(
    number: signal.Signals, after: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The script sends it to itself after the callbacks of a step."""
    expected = steps(whole((), tmp_path_factory) / "all.jsonl")
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "first.jsonl", str(EPOCHS), "preempt", kill_at=after, by=number)
    first = steps(tmp_path / "first.jsonl")
    assert len(first) == after + 1
    run(SCRIPT, tmp_path, tmp_path / "resumed.jsonl", str(EPOCHS), "preempt")
    assert first + steps(tmp_path / "resumed.jsonl") == expected
    assert weights_equal(WHOLE[()] / "all.pt", tmp_path / "resumed.pt")


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
    """Notes which samples each loop gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch.indices.tolist())
        loss: torch.Tensor = torch.nn.functional.cross_entropy(self.layer(batch[0].mean((2, 3))), batch[1])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["val"].append(batch.indices.tolist())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["test"].append(batch.indices.tolist())

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["predict"].append(batch.indices.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **options: Any) -> Any:
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return lightning.Trainer(**{**silent, "max_epochs": 1, "default_root_dir": folder, **options})


def test_every_loop_has_its_pipeline_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file, model = make_data(tmp_path), Model()
    data = DataModule(file, test="val", predict="val")
    with nothing_left_behind():
        trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(model, data)
        trainer(tmp_path).test(model, data)
        trainer(tmp_path).predict(model, data)
    whole_pass = [list(range(first, min(first + 4, 30))) for first in range(0, 30, 4)]
    assert model.seen["val"] == 2 * whole_pass
    assert model.seen["test"] == model.seen["predict"] == whole_pass
    for epoch in range(2):
        steps_of_epoch = model.seen["train"][8 * epoch : 8 * epoch + 8]
        assert sorted(i for step in steps_of_epoch for i in step) == list(range(30))
    assert model.seen["train"][:8] != model.seen["train"][8:]


def test_overfit_batches_trains_on_the_same_batches_in_each_epoch(tmp_path: Path) -> None:
    """Also if a checkpoint is restored, whether of the middle of an epoch or of its end."""
    file, model = make_data(tmp_path), Model()
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"overfit_batches": 3, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer(tmp_path, max_epochs=3, callbacks=[checkpoints], **options).fit(model, DataModule(file))
    first, *others = (model.seen["train"][start : start + 3] for start in range(0, 9, 3))
    assert len({i for batch in first for i in batch}) == 12 and others == [first, first]
    for step in (1, 3):
        checkpoint, resumed = next((tmp_path / "checkpoints").glob(f"*step={step}.ckpt")), Model()
        trainer(tmp_path, max_epochs=3, **options).fit(resumed, DataModule(file), ckpt_path=checkpoint)
        seen = resumed.seen["train"]
        assert len(seen) == 9 - step and seen[-3:] == first
        assert all(batch in first for batch in seen)


def test_a_file_without_val_trains_without_validation(tmp_path: Path) -> None:
    model = Model()
    trainer(tmp_path).fit(model, DataModule(make_data(tmp_path), val="absent"))
    assert len(model.seen["train"]) == 8 and not model.seen["val"]
    with pytest.raises(ConfigError, match="test"):
        trainer(tmp_path).test(model, DataModule(make_data(tmp_path)))


SKIP_IN_TRAINING = "pipelines.train.on_error=skip"
LAST_STEP_IS_BAD = ["pipelines.train.shuffle=false", "pipelines.train.batch.size=29", SKIP_IN_TRAINING]


def damage_last_photo(folder: Path) -> None:
    max(folder.glob("photos/*/*")).write_bytes(b"not an image")


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_step_of_bad_samples_alone_is_an_error(name: str, tmp_path: Path) -> None:
    """Lightning counts batches: without that step it would not validate, nor apply the gradients accumulated last."""
    file, model = make_data(tmp_path), Model()
    damage_last_photo(tmp_path)
    overrides = [entry.replace(".train.", f".{name}.") for entry in LAST_STEP_IS_BAD]
    with pytest.raises(TooManyBadSamples, match=r"step 1 of epoch 0 holds nothing but bad samples"):
        trainer(tmp_path, num_sanity_val_steps=0).fit(model, DataModule(file, overrides=overrides))
    replaced = DataModule(file, overrides=[*overrides[:-1], "run.on_error=replace"])
    trainer(tmp_path, num_sanity_val_steps=0).fit(model, replaced)
    assert model.seen["val"]


def test_the_loaders_end_with_an_error_in_the_loop(tmp_path: Path) -> None:
    class Failing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyError("a fault")

    data = DataModule(make_data(tmp_path))
    with nothing_left_behind(), pytest.raises(KeyError, match="a fault"):
        trainer(tmp_path).fit(Failing(), data)


def test_a_place_within_an_epoch_of_other_steps_is_refused(tmp_path: Path) -> None:
    file = make_data(tmp_path)
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_top_k=-1)
    trainer(tmp_path, callbacks=[checkpoints]).fit(Model(), DataModule(file))
    checkpoint = next((tmp_path / "checkpoints").glob("*step=3.ckpt"))
    other = DataModule(file, overrides=["pipelines.train.batch.size=6"])
    message = "whose steps have 4 samples on all ranks, here they have 6"
    with pytest.raises(StateError, match=message):
        trainer(tmp_path).fit(Model(), other, ckpt_path=checkpoint)


def test_two_processes_take_their_shares(tmp_path: Path) -> None:
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "two.jsonl", "1", "devices=2")
    taken = [step["indices"] for step in steps(tmp_path / "two.jsonl")]
    assert len(taken) == 8 and len({i for step in taken for i in step}) == 30, "2 are wrapped around"
