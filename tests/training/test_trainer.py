"""Training: results, checkpoints, and a run that is interrupted at any step ends with the same weights."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gpuflow.config import Config, read_config
from gpuflow.config.models import SaveSpec
from gpuflow.engines.pytorch import load_checkpoint
from gpuflow.errors import ConfigError, GpuflowError, StateError, TooManyBadSamples
from gpuflow.runtime.ranks import Group, Ranks
from gpuflow.sources import Subset
from gpuflow.stages import STAGES
from gpuflow.training.objective import Objective
from gpuflow.training.trainer import PassResult, Trainer, TrainerEvents, _PassTotals
from tests.datasets import make_photos, nothing_left_behind, write_config
from tests.texts import outline
from tests.training.killing import KillAt, Killed

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
"""Two epochs of three steps."""


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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Record(TrainerEvents):
    """The events of a trainer."""

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

    def means(self) -> list[tuple[str, int, float, float, range, int]]:
        """The results of all passes, without their rates."""
        return [
            (name, epoch, r.loss, r.measures["accuracy"], r.steps, r.steps_in_pass) for name, epoch, r in self.results
        ]


def test_a_run_trains_validates_and_saves(config_file: Path) -> None:
    with nothing_left_behind():
        trainer, record = Trainer(read(config_file), device="cpu"), Record()
        before = weights(trainer)
        result = trainer.run(record)
    assert record.passes == [("train", 0, 3), ("val", 0, 3), ("train", 1, 3), ("val", 1, 3)]
    assert record.steps == 12
    assert (trainer.step, trainer.epoch) == (STEPS, 1)
    assert result == record.results[-1][2]
    assert all(0 <= r.measures["accuracy"] <= 1 and r.loss > 0 and r.images_per_s > 0 for _, _, r in record.results)
    assert not same(before, weights(trainer))
    state: dict[str, Any] = torch.load(trainer.checkpoint, weights_only=True)
    assert (state["version"], state["arch"], state["step"]) == (1, "squeezenet1_1", STEPS)
    assert state["classes"] == ["class_0", "class_1", "class_2"]
    assert state["preprocessing"] == read(config_file).programs["val"].pipeline.fingerprint
    assert state["train_preprocessing"] == read(config_file).programs["train"].pipeline.fingerprint
    assert (state["loader"]["epoch"], state["loader"]["position"]) == (2, 0)
    assert names(trainer.checkpoint.parent) == [".lock", "best.pt", "classes.csv", "last.pt", "metrics.csv"]


SKIP = "pipelines.train.on_error=skip", "pipelines.train.batch.size=2", "run.max_bad=null"


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
def test_a_batch_of_which_one_image_is_left_says_how_to_avoid_that(tmp_path: Path, config_file: Path) -> None:
    make_photos(tmp_path / "two", classes=1, each=2)
    sorted((tmp_path / "two").rglob("*.jpg"))[0].write_bytes(b"no image")
    settings = *SKIP, f"source.folder={tmp_path / 'two'}", "train.model=resnet18"
    with pytest.raises(GpuflowError) as caught:
        Trainer(read(config_file, *settings), device="cpu").run(Record())
    assert str(caught.value) == (
        f"{config_file}: a batch of epoch 0 has one image (2 samples in batches of 2), with which resnet18 cannot "
        "train; set pipelines.train.on_error: replace, or remove the images that `gpuflow scan` lists"
    )


def test_a_resumed_run_has_the_weight_decay_that_the_file_says_now(config_file: Path) -> None:
    Trainer(read(config_file), device="cpu").run(Record(), max_steps=1)
    resumed = Trainer(read(config_file, "train.weight_decay=0.25"), device="cpu", resume=True)
    assert [group["weight_decay"] for group in resumed._optimizer.param_groups] == [0.25]


def test_a_resumed_run_validates_the_samples_of_the_same_epoch(config_file: Path) -> None:
    """Which matters where validation draws."""
    shuffled = "pipelines.val.shuffle=true", "pipelines.val.batch.drop_last=true", "pipelines.val.batch.size=5"
    trainer = Trainer(read(config_file, *shuffled), device="cpu", resume=False)
    trainer.run(Record(), max_steps=3)
    resumed = Trainer(read(config_file, *shuffled), device="cpu", resume=True)
    resumed.run(Record())
    assert resumed.val_loader is not None and resumed.val_loader.upcoming_epoch == 2


@pytest.mark.parametrize("model", ["shufflenet_v2_x0_5", "squeezenet1_1"])
def test_resumed_at_any_step_ends_with_the_same_weights_and_results(model: str, config_file: Path) -> None:
    """shufflenet_v2_x0_5 has batch statistics, squeezenet1_1 draws dropout from torch's generator."""
    at = range(1, STEPS) if model == "squeezenet1_1" else (2, 4)
    overrides = [f"train.model={model}"]
    whole, expected = Trainer(read(config_file, *overrides), device="cpu"), Record()
    whole.run(expected)
    for step in at:
        first, before = Trainer(read(config_file, *overrides, "run.threads=1"), device="cpu", force=True), Record()
        first.run(before, max_steps=step)
        assert first.step == step
        assert not same(weights(first), weights(whole))
        torch.manual_seed(99)  # another process has another generator
        second, after = Trainer(read(config_file, *overrides), device="cpu", resume=True), Record()
        assert second.step == step
        second.run(after)
        assert same(weights(second), weights(whole)), f"interrupted after step {step}"
        began = 2 * (step // 3)  # an epoch is two passes
        assert before.means()[:began] + after.means() == expected.means(), f"interrupted after step {step}"
        if step % 3:
            (_, _, _, _, steps, in_all) = before.means()[-1]
            assert (steps, in_all) == (range(step % 3), 3)


def test_an_epoch_of_weighted_draws_is_resumed_at_its_step(config_file: Path, tmp_path: Path) -> None:
    """Such an epoch has more samples than the source: 20 of 12 here, in five steps."""
    file = tmp_path / "weights.txt"
    file.write_text("\n".join(str(1 + i % 3) for i in range(12)))
    document = yaml.safe_load(config_file.read_text())
    document["source"]["weights"] = {"file": str(file), "samples": 20}
    path = tmp_path / "weighted.yaml"
    path.write_text(yaml.safe_dump(document))
    for step in (3, 4, 6):
        Trainer(read(path), device="cpu", force=True).run(TrainerEvents(), max_steps=step)
        second = Trainer(read(path), device="cpu", resume=True)
        assert second.step == step
        assert second.train_loader.upcoming_epoch == step // 5


def test_a_finished_run_has_nothing_to_resume(config_file: Path) -> None:
    Trainer(read(config_file), device="cpu").run(TrainerEvents())
    again, record = Trainer(read(config_file), device="cpu", resume=True), Record()
    assert again.run(record) is None
    assert record.passes == []


@pytest.mark.parametrize(
    ("size", "action"),
    [
        (11, "set pipelines.train.batch.drop_last: true, or another size"),
        (1, "set pipelines.train.batch.size to 2 or more"),
    ],
)
def test_a_batch_of_one_image_that_cannot_be_trained_on_is_explained(config_file: Path, size: int, action: str) -> None:
    options = ("train.model=resnet18", f"pipelines.train.batch.size={size}")
    with pytest.raises(GpuflowError) as caught:
        Trainer(read(config_file, *options), device="cpu").run(TrainerEvents())
    assert str(caught.value) == (
        f"{config_file}: a batch of epoch 0 has one image (12 samples in batches of {size}), with which resnet18 "
        f"cannot train; {action}"
    )


def test_a_directory_in_the_place_of_the_checkpoint_is_noticed_before_training(config_file: Path) -> None:
    trainer = Trainer(read(config_file), device="cpu")
    trainer.checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"train\.out cannot be written: Is a directory: '.*last\.pt'.*name another"):
        trainer.run(TrainerEvents())
    assert trainer.step == 0


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
def test_a_validation_of_bad_images_alone_is_an_error(config_file: Path, tmp_path: Path) -> None:
    make_photos(tmp_path / "own", classes=3, each=4)
    options = (f"source.folder={tmp_path / 'own'}", "source.split.train=0.5", "source.split.val=0.5")
    trainer = Trainer(read(config_file, *options), device="cpu")
    assert trainer.val_loader is not None
    for index in range(len(trainer.val_loader.dataset)):
        Path(trainer.val_loader.dataset.path(index)).write_bytes(b"no image")
    with pytest.raises(TooManyBadSamples, match="step 0 of epoch 0 holds nothing but bad samples"):
        trainer.run(TrainerEvents())


def test_without_a_val_pipeline_there_is_no_validation(config_file: Path, tmp_path: Path) -> None:
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
    objective = Objective(labels="class", loss="cross_entropy", outputs=2)
    totals = _PassTotals(torch.device("cpu"), Ranks(rank=0, world_size=2), objective)

    def add(losses: list[float], right: int, valid: int) -> None:
        """Add a batch in which the first samples are right, and the first ones count."""
        labels = torch.tensor([1] * right + [0] * (len(losses) - right))
        logits = torch.tensor([[0.0, 1.0]] * len(losses))
        totals.add(torch.tensor(losses), logits, labels, torch.arange(len(losses)) < valid)

    add([1.0, 2.0, 2.0, 1.0], 1, 4)
    loss, images_per_s = totals.so_far()
    assert loss == 1.5
    assert images_per_s > 0
    add([1.0, 2.0, math.nan], 1, 2)
    assert totals.so_far() == (loss, images_per_s), "half a second is not over"
    totals._next_read = 0.0
    add([3.0], 1, 0)
    assert totals.so_far()[0] == 1.5
    result = totals.result(Group(Ranks(), torch.device("cpu")), range(3), 3)
    assert (result.loss, result.measures["accuracy"]) == (1.5, 2 / 6)


def test_an_unknown_model_is_located(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(read(config_file, "train.model=resnet81"), device="cpu")
    assert str(caught.value) == (
        f"{config_file}: train.model is not a torchvision classification model, got 'resnet81'; "
        "did you mean 'resnet18'?"
    )


@pytest.mark.parametrize(
    ("model", "size", "reason", "action"),
    [
        ("vit_b_16", 32, "Wrong image height! Expected 224 but got 32!", "set train.size=224"),
        ("alexnet", 32, "", "set train.size=224"),
        ("inception_v3", 224, "", "set train.size=299"),
    ],
)
def test_images_that_the_model_does_not_take_are_located(
    config_file: Path, model: str, size: int, reason: str, action: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(read(config_file, f"train.model={model}", f"train.size={size}"), device="cpu")
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{config_file}: train.model must take the images of train, which have ")
    assert f"{size}x{size} pixels: {reason}" in first
    assert first.endswith(f"got '{model}'; {action}, or another size or model")


def test_auxiliary_classifiers_are_trained_too(config_file: Path) -> None:
    """GoogLeNet has two, whose logits are returned with its own while it trains."""
    trainer = Trainer(read(config_file, "train.model=googlenet", "train.size=64"), device="cpu")
    before, events = weights(trainer), Record()
    trainer.run(events, max_steps=STEPS // 2)
    after = weights(trainer)
    changed = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert {"fc", "aux1", "aux2"} <= changed
    assert [name for name, _, _ in events.results] == ["train", "val"]
    saved = load_checkpoint(str(trainer.checkpoint))[0]
    assert same(saved.state_dict(), after)


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
        f"{place}: was trained with preprocessing {trainer.preprocessing}, the configuration says {ours}; "
        "restore the configuration or set another train.out"
    )
    with pytest.raises(
        StateError,
        match=r"last\.pt: the state was taken with seed 0 .*; restore the files and the",
    ):
        Trainer(read(config_file, "pipelines.train.stages.random_resized_crop.ratio=[1, 1]"), device="cpu", resume=True)


def test_statistics_after_an_epoch_are_those_of_its_last_weights(config_file: Path) -> None:
    trainer = Trainer(read(config_file, "train.model=resnet18"), device="cpu")
    trainer.run(TrainerEvents(), max_steps=3)
    again = Trainer(read(config_file, "train.model=resnet18"), device="cpu", resume=True)
    stand = again.train_loader.state_dict()
    assert (stand["epoch"], stand["position"]) == (1, 0), "the loader is where the epoch ended"
    convolution, norm = again.model.conv1, again.model.bn1
    assert isinstance(norm, torch.nn.BatchNorm2d) and isinstance(convolution, torch.nn.Conv2d)
    with again.train_loader as loader, torch.no_grad():
        loader.set_epoch(0)
        means = [convolution(images).mean((0, 2, 3)) for images, _ in loader]
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0), rtol=1e-4, atol=1e-4)
    assert norm.momentum == 0.1


def test_statistics_need_no_sample_that_the_epoch_has_not_read(photos: Path, config_file: Path) -> None:
    """`drop_last` leaves out two of twelve samples, of which the next epoch reads at least one in its first batch."""
    overrides = ["train.model=resnet18", "train.epochs=1", "pipelines.train.batch={size: 10, drop_last: true}"]
    overrides += ["pipelines.train.on_error=raise", f"source.folder={config_file.parent / 'copy'}"]
    shutil.copytree(photos, config_file.parent / "copy")
    with Trainer(read(config_file, *overrides), device="cpu").train_loader as loader:
        first, second = ({index for batch in loader for index in batch.indices.tolist()} for _ in range(2))
        unread = second - first
        for index in unread:
            Path(loader.dataset.path(index)).write_bytes(b"not an image")
    trainer = Trainer(read(config_file, *overrides), device="cpu")
    with pytest.warns(UserWarning, match="samples are bad"):  # of the pipeline val, which has these files, too
        trainer.run(TrainerEvents(), max_steps=1)
    assert unread and trainer.checkpoint.exists()


# --- saving within an epoch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "killed_at", "resumed_at"),
    [("{steps: 1}", 2, 1), ("{steps: 2}", 3, 2), ("{steps: 2}", 6, 5), ("{minutes: 1e-9}", 3, 2)],
)
def test_a_run_that_is_killed_within_an_epoch_goes_on_from_its_last_save(
    every: str, killed_at: int, resumed_at: int, config_file: Path
) -> None:
    """A step in the second epoch counts the steps of validation between; a checkpoint also follows each epoch."""
    whole, expected = Trainer(read(config_file), device="cpu"), Record()
    whole.run(expected)
    steps_before_kill = killed_at + 3 * (killed_at > 3)
    killed = Trainer(read(config_file, f"train.save_every={every}"), device="cpu", force=True)
    with pytest.raises(Killed):
        killed.run(KillAt(steps_before_kill))
    torch.manual_seed(99)
    resumed, record = Trainer(read(config_file), device="cpu", resume=True), Record()
    assert resumed.step == resumed_at
    resumed.run(record)
    assert same(weights(resumed), weights(whole))
    assert record.means() == expected.means()[2 * (resumed_at // 3) :]


# --- mixed labels -----------------------------------------------------------------------------------------------------

MIXUP = {"mixup": {"alpha": 0.8, "cutmix_alpha": 1.0, "mode": "elem", "label_smoothing": 0.1}}


@pytest.fixture
def mixing_file(config_file: Path) -> Path:
    document = yaml.safe_load(config_file.read_text())
    document["pipelines"]["train"]["stages"].append(MIXUP)
    config_file.write_text(yaml.safe_dump(document))
    return config_file


def test_the_loss_is_the_cross_entropy_with_mixed_labels(mixing_file: Path) -> None:
    trainer = Trainer(read(mixing_file, "train.model=resnet18"), device="cpu")
    with trainer.train_loader as loader:
        images, labels = next(iter(loader))
    assert (labels.dtype, labels.shape) == (torch.float32, (4, 3))
    assert trainer.val_loader is not None
    trainer.val_loader.close()
    trainer.model.train()
    logits = trainer.model(images)
    expected = -(labels * logits.log_softmax(dim=1)).sum(dim=1).mean()
    correct = (logits.argmax(dim=1) == labels.argmax(dim=1)).float().mean()
    again, record = Trainer(read(mixing_file, "train.model=resnet18"), device="cpu"), Record()
    again.run(record, max_steps=1)
    ((name, _, result),) = record.results
    assert name == "train"
    assert result.loss == pytest.approx(expected.item(), rel=1e-4)
    assert result.measures["accuracy"] == correct.item()


def test_a_run_that_mixes_validates_with_classes_and_goes_on_exactly(mixing_file: Path) -> None:
    whole, record = Trainer(read(mixing_file), device="cpu"), Record()
    result = whole.run(record)
    assert [name for name, _, _ in record.results] == ["train", "val"] * 2
    assert result is not None
    right = 12 * result.measures["accuracy"]
    assert right == pytest.approx(round(right))
    killed = Trainer(read(mixing_file, "train.save_every={steps: 1}"), device="cpu", force=True)
    with pytest.raises(Killed):
        killed.run(KillAt(3))
    torch.manual_seed(99)
    resumed = Trainer(read(mixing_file, "run.threads=1"), device="cpu", resume=True)
    assert resumed.step == 2
    resumed.run(TrainerEvents())
    assert same(weights(resumed), weights(whole))


def test_by_default_ten_minutes_are_lost_at_most(config_file: Path) -> None:
    assert read(config_file).train.save_every == SaveSpec(minutes=10.0)


# --- the directory of a run -------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_found_before_the_first_step(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = f"{tmp_path}/file/run"
    trainer, record = Trainer(read(config_file, f"train.out={out}"), device="cpu"), Record()
    with pytest.raises(ConfigError) as caught:
        trainer.run(record)
    (problem,) = caught.value.problems
    assert (problem.place, problem.path, problem.value) == (f"{config_file}:", ("train", "out"), out)
    assert problem.rule == f"cannot be written: Not a directory: '{out}'"
    assert (record.steps, record.passes) == (0, [])


class AnotherRun(TrainerEvents):
    """Starts another run in the same directory during the first step."""

    def __init__(self, config: Config) -> None:
        self.config, self.errors = config, list[ConfigError]()

    def step(self, loss: float, images_per_s: float) -> None:
        if not self.errors:
            with pytest.raises(ConfigError) as caught:
                Trainer(self.config, device="cpu").run(TrainerEvents())
            self.errors.append(caught.value)


def test_a_second_run_in_one_directory_is_refused_while_the_first_goes_on(config_file: Path, tmp_path: Path) -> None:
    config = read(config_file)
    trainer, other = Trainer(config, device="cpu"), AnotherRun(config)
    trainer.run(other, max_steps=2)
    (problem,) = other.errors[0].problems
    assert (problem.path, problem.value) == (("train", "out"), str(tmp_path / "run"))
    assert (problem.rule, problem.action) == (
        "is in use by another run of gpuflow train",
        "wait for it, or name another directory",
    )
    Trainer(config, device="cpu", resume=True).run(TrainerEvents(), max_steps=1)


def test_a_checkpoint_that_another_run_wrote_meanwhile_is_not_overwritten(config_file: Path) -> None:
    new = Trainer(read(config_file), device="cpu")
    Trainer(read(config_file), device="cpu").run(TrainerEvents(), max_steps=1)
    late = Trainer(read(config_file), device="cpu", resume=True)
    Trainer(read(config_file), device="cpu", resume=True).run(TrainerEvents(), max_steps=1)
    for trainer in (new, late):
        with pytest.raises(StateError, match="another run has written it since this one started; go on with --resume"):
            trainer.run(TrainerEvents())


def test_a_checkpoint_of_an_earlier_run_is_kept_without_force(config_file: Path, tmp_path: Path) -> None:
    """It is found before the source is opened."""
    first = Trainer(read(config_file), device="cpu")
    first.run(TrainerEvents(), max_steps=1)
    before = first.checkpoint.read_bytes()
    with pytest.raises(ConfigError) as caught:
        Trainer(read(config_file, f"source.folder={tmp_path}/nowhere"), device="cpu")
    (problem,) = caught.value.problems
    assert (problem.place, problem.path, problem.value) == (f"{config_file}:", ("train", "out"), f"{tmp_path}/run")
    assert problem.rule == "holds the checkpoint of another run"
    assert problem.action == "--resume goes on with that run, --force overwrites it, another directory keeps both"
    assert first.checkpoint.read_bytes() == before
    forced = Trainer(read(config_file), device="cpu", force=True)
    forced.run(TrainerEvents(), max_steps=1)
    assert (forced.step, torch.load(forced.checkpoint, weights_only=True)["step"]) == (1, 1)


def test_an_older_checkpoint_leaves_results_of_the_rest_of_its_epoch(config_file: Path) -> None:
    """It has no sums of the steps before it, as one that several ranks saved by time."""
    first = Trainer(read(config_file), device="cpu")
    first.run(TrainerEvents(), max_steps=1)
    state = torch.load(first.checkpoint, weights_only=True)
    del state["epoch_sums"]
    torch.save(state, first.checkpoint)
    for done, steps in ((1, range(1, 2)), (2, range(2, 3))):
        resumed, record = Trainer(read(config_file), device="cpu", resume=True), Record()
        assert resumed.step == done
        resumed.run(record, max_steps=1)
        assert record.means()[0][4:] == (steps, 3)


def test_what_a_killed_run_left_half_written_is_removed(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".last.pt.01234567.partial").write_bytes(b"half")
    Trainer(read(config_file), device="cpu").run(TrainerEvents(), max_steps=1)
    assert names(tmp_path / "run") == [".lock", "last.pt"]


def test_a_checkpoint_behind_a_link(config_file: Path, tmp_path: Path) -> None:
    """The link stays. What a killed run left half-written lies where it leads to."""
    link, file = tmp_path / "run" / "last.pt", tmp_path / "large [disk]" / "a.pt"
    for path in (link, file):
        path.parent.mkdir()
    link.symlink_to(file)
    (file.parent / ".a.pt.01234567.partial").write_bytes(b"half")
    Trainer(read(config_file), device="cpu").run(TrainerEvents(), max_steps=1)
    assert link.is_symlink()
    assert (names(link.parent), names(file.parent)) == ([".lock", "last.pt"], ["a.pt"])


def test_a_full_disk_is_located_and_leaves_the_old_checkpoint(config_file: Path) -> None:
    trainer = Trainer(read(config_file), device="cpu")
    trainer.run(TrainerEvents(), max_steps=1)
    before = trainer.checkpoint.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # every longer file fails as on a full disk
    try:
        with pytest.raises(ConfigError, match=r"train\.out cannot be written: ") as caught:
            trainer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free space there or name another directory; --resume goes on" in str(caught.value)
    assert trainer.checkpoint.read_bytes() == before
    assert names(trainer.checkpoint.parent) == [".lock", "last.pt"]


# --- checkpoints that are damaged -------------------------------------------------------------------------------------


def _without(key: str) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        del state[key]
        torch.save(state, path)

    return damage


def _with(**values: object) -> Callable[[Path], object]:
    return lambda path: torch.save({**torch.load(path, weights_only=True), **values}, path)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read as a checkpoint of gpuflow train: "),
        (lambda path: path.write_bytes(b"PK" + bytes(100)), "cannot be read as a checkpoint of gpuflow train: "),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "cannot be read as a checkpoint of gpuflow train: "),
        (lambda path: torch.save([1], path), "is not a checkpoint of gpuflow train: it has no arch, classes, model, "),
        (_without("arch"), "is not a checkpoint of gpuflow train: it has no arch; restore an older copy, or train"),
        (_without("loader"), "is not a checkpoint of gpuflow train: it has no loader; restore an older copy, or train"),
        (_with(loader=3), "not a loader's state: "),
        (_with(optimizer=3), "does not hold the weights of squeezenet1_1 and its optimizer: "),
        (_with(optimizer=None), "does not hold the weights of squeezenet1_1 and its optimizer: "),
        (_with(version=9), "is a checkpoint of version 9, this gpuflow reads version 1; upgrade gpuflow"),
        (_with(model={}), "does not hold the weights of squeezenet1_1 and its optimizer: "),
        (_with(optimizer={}), "does not hold the weights of squeezenet1_1 and its optimizer: "),
    ],
)
def test_a_damaged_checkpoint_is_located(damage: Callable[[Path], object], what: str, config_file: Path) -> None:
    trainer = Trainer(read(config_file), device="cpu")
    trainer.checkpoint.parent.mkdir()
    damage(trainer.save())
    with pytest.raises(StateError) as caught:
        Trainer(read(config_file), device="cpu", resume=True)
    assert str(caught.value).startswith(f"{trainer.checkpoint}: {what}")


# --- what can be trained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["pipelines.train.stages=[decode, random_resized_crop: {size: 32}]"],
            "pipelines.train.stages must give float32 images to train a model on, give uint8; "
            "end them with - normalize: {mean: imagenet, std: imagenet}",
        ),
        (
            ["pipelines.val.stages.normalize={dtype: float16}"],
            "pipelines.val.stages must give float32 images to train a model on, give float16; "
            "end them with - normalize: {mean: imagenet, std: imagenet}",
        ),
        (
            [f"pipelines.{name}.stages.decode={{color: gray}}" for name in ("train", "val")]
            + [f"pipelines.{name}.stages.normalize={{mean: [0.5], std: [0.5]}}" for name in ("train", "val")],
            "pipelines.train.stages must give images of 3 channels, which squeezenet1_1 takes, give 1; "
            "decode with color: rgb",
        ),
        (
            ["pipelines.val.stages=[decode, center_crop: {size: 32}, normalize, mixup]"],
            "pipelines.val.stages must not mix samples to validate with; remove its mixing stages",
        ),
    ],
)
def test_images_that_no_model_takes_are_located(overrides: list[str], expected: str, config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(read(config_file, *overrides), device="cpu")
    assert str(caught.value).splitlines()[0] == f"{config_file}: {expected}"


def listed(config_file: Path, photos: Path, kind: str | None, labels: list[Any]) -> None:
    """Let the file read the photographs from a listing, with labels of a kind; None: without."""
    listing = config_file.with_name("rows.jsonl")
    rows = [
        {"path": str(file), "label": label} for file, label in zip(sorted(photos.rglob("*.jpg")), labels, strict=True)
    ]
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = yaml.safe_load(config_file.read_text())
    fields: dict[str, Any] = {"image": {"column": "path"}}
    if kind is not None:
        fields["label"] = {"kind": kind, **({"separator": "|"} if kind == "classes" else {})}
    document["source"] = {"listing": str(listing), "fields": fields}
    config_file.write_text(yaml.safe_dump(document))


def test_samples_without_labels_are_located(config_file: Path, photos: Path) -> None:
    listed(config_file, photos, None, [None] * 12)
    with pytest.raises(ConfigError) as caught:
        Trainer(read(config_file), device="cpu")
    assert outline(caught.value) == f"{config_file}: source config.conflict"


# --- the learning rate ------------------------------------------------------------------------------------------------


def test_the_default_learning_rate_is_in_proportion_to_the_samples_of_a_step(config_file: Path) -> None:
    document = yaml.safe_load(config_file.read_text())
    del document["train"]["lr"]
    config_file.write_text(yaml.safe_dump(document))
    rates = [
        Trainer(read(config_file, *more), device="cpu")._highest_rate()
        for more in ([], ["pipelines.train.batch.size=8"], ["pipelines.train.batch.size=64"], ["train.lr=0.3"])
    ]
    assert rates == [0.1 * 4 / 256, 0.1 * 8 / 256, 0.1 * 12 / 256, 0.3], "12 samples are all there are"


@pytest.mark.parametrize(("steps", "warm"), [(1, 1), (6, 2), (84, 25), (500, 100), (4000, 200)])
def test_the_learning_rate_rises_then_falls(steps: int, warm: int, config_file: Path) -> None:
    trainer = Trainer(read(config_file), device="cpu")
    trainer._steps_in_all = steps
    rates = []
    for trainer.step in range(steps):
        rates.append(trainer._learning_rate())
    assert rates[:warm] == pytest.approx([0.01 * (step + 1) / warm for step in range(warm)])
    assert rates.index(max(rates)) in (warm - 1, warm)
    assert rates[warm:] == sorted(rates[warm:], reverse=True)


def test_a_first_run_on_few_images_looks_sane(photos: Path, tmp_path: Path) -> None:
    """A rate that suits large batches gives losses in the thousands here."""
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 32}}, {"normalize": {}}]
    config = write_config(
        tmp_path / "x.yaml", photos, train=stages, val=stages, fit={"epochs": 2, "out": str(tmp_path / "run")}
    )
    record = Record()
    Trainer(read(config), device="cpu").run(record)
    losses = [result.loss for _, _, result in record.results]
    assert max(losses) < 2 * math.log(3)


class Unwritable:
    """A value of a checkpoint whose writing fails."""

    def __reduce__(self) -> str:
        raise OSError(28, "No space left on device")


def test_a_checkpoint_is_whole_or_not_at_all(config_file: Path) -> None:
    trainer = Trainer(read(config_file), device="cpu")
    trainer.run(TrainerEvents(), max_steps=1)
    before = trainer.checkpoint.read_bytes()
    trainer._optimizer.param_groups[0]["lr"] = Unwritable()
    with pytest.raises(ConfigError, match=r"train\.out cannot be written: "):
        trainer.save()
    assert trainer.checkpoint.read_bytes() == before
    assert names(trainer.checkpoint.parent) == [".lock", "last.pt"]
