"""The options of `gpuflow train`: each resumes exactly, and computes what other libraries compute."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional as F
from torchvision import models

import gpuflow
from gpuflow.config import Config, ModelSpec, read_config
from gpuflow.engines import open_engine
from gpuflow.engines.pytorch import load_checkpoint
from gpuflow.errors import ConfigError, GpuflowError, MissingExtra, StateError
from gpuflow.stages import STAGES
from gpuflow.training.objective import Objective, mean_average_precision
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.datasets import write_config
from tests.texts import outline
from tests.training.killing import KillAt, Killed

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
"""Two epochs of three steps, and of three in validation."""
LABELS: dict[str, list[Any]] = {
    "class": ["cat", "dog", "cow"] * 4,
    "classes": ["cat|dog", "cow", "dog"] * 4,
    "number": [0.5, 1.5, 3.0] * 4,
    "vector": [[0.5, 1.0], [1.5, 2.0], [3.0, 0.0]] * 4,
}


@pytest.fixture
def config_file(photos: Path, tmp_path: Path) -> Path:
    return of_kind("class", photos, tmp_path)


def of_kind(kind: str, photos: Path, folder: Path) -> Path:
    """A file whose samples have labels of a kind."""
    paths = sorted(photos.rglob("*.jpg"))
    rows = [{"path": str(file), "label": label} for file, label in zip(paths, LABELS[kind], strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    label = {"kind": kind, **({"separator": "|"} if kind == "classes" else {})}
    source = {"listing": str(folder / "rows.jsonl"), "fields": {"image": {"column": "path"}, "label": label}}
    fit = {"model": "squeezenet1_1", "epochs": 2, "lr": 0.01, "out": str(folder / "run")}
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 32}}, {"normalize": {}}]
    val = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}}]
    return write_config(folder / "x.yaml", Path(), source=source, train=stages, val=val, fit=fit)


def read(path: Path, *overrides: str) -> Config:
    return read_config(path, STAGES, overrides)


def trainer_of(path: Path, *overrides: str, **options: Any) -> Trainer:
    return Trainer(read(path, *overrides), device="cpu", **options)


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def left_by(folder: Path) -> dict[str, Any]:
    """What a run leaves, without rates."""
    states = {name: torch.load(folder / name, weights_only=True) for name in ("last.pt", "best.pt")}
    for state in states.values():
        for row in state["history"]:
            del row["images_per_s"]
    rows = table(folder / "metrics.csv")
    for row in rows:
        del row["images_per_s"]
    return {**states, "rows": rows, "classes": (folder / "classes.csv").read_text() if rows else ""}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# --- resume -----------------------------------------------------------------------------------------------------------

OPTIONS = {
    "adamw, bf16, average": ("train.optimizer=adamw", "train.amp=bf16", "train.ema=0.9"),
    "steps, batch statistics": (
        "train.model=shufflenet_v2_x0_5",
        "train.ema=0.9",
        "train.schedule=step",
        "train.step_epochs=1",
        "train.warmup_epochs=0.5",
        "train.label_smoothing=0.1",
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_resumes_bit_for_bit(options: tuple[str, ...], config_file: Path) -> None:
    """Killed in the first epoch, in its validation, and in the second one; stopped after the first."""
    run = config_file.parent / "run"
    trainer_of(config_file, *options).run(TrainerEvents())
    expected = left_by(run)
    assert [row["epoch"] for row in expected["rows"]] == ["1", "2"]
    for event in (3, 5, 8, None):
        killed = trainer_of(config_file, *options, "train.save_every={steps: 1}", force=True)
        if event is None:
            killed.run(TrainerEvents(), max_steps=3)
        else:
            with pytest.raises(Killed):
                killed.run(KillAt(event))
        torch.manual_seed(99)
        trainer_of(config_file, *options, resume=True).run(TrainerEvents())
        assert equal(left_by(run), expected), f"killed at event {event}"


@pytest.mark.parametrize("lost", ["best.pt", "metrics.csv"])
def test_what_a_kill_after_the_last_save_left_out_is_written_by_the_next_run(lost: str, config_file: Path) -> None:
    trainer = trainer_of(config_file, "train.epochs=1")
    trainer.run(TrainerEvents())
    before = (trainer.checkpoint.with_name(lost)).read_bytes()
    trainer.checkpoint.with_name(lost).unlink()
    trainer_of(config_file, "train.epochs=1", resume=True).run(TrainerEvents())
    assert trainer.checkpoint.with_name(lost).read_bytes() == before


def test_another_optimizer_does_not_resume(config_file: Path) -> None:
    trainer_of(config_file).run(TrainerEvents(), max_steps=1)
    with pytest.raises(StateError) as caught:
        trainer_of(config_file, "train.optimizer=adamw", resume=True)
    assert outline(caught.value) == f"{config_file.parent}/run/last.pt"


def test_files_of_another_run_are_kept_without_force(config_file: Path) -> None:
    run = config_file.parent / "run"
    run.mkdir()
    (run / "best.pt").write_bytes(b"mine")
    with pytest.raises(ConfigError) as caught:
        trainer_of(config_file)
    assert outline(caught.value).startswith(f"{config_file}: train.out config.rule, got '")
    assert (run / "best.pt").read_bytes() == b"mine"
    trainer_of(config_file, force=True).run(TrainerEvents(), max_steps=1)
    assert sorted(file.name for file in run.iterdir()) == [".lock", "last.pt"]


# --- what is computed -------------------------------------------------------------------------------------------------


def test_the_average_of_the_weights_is_validated_and_served(config_file: Path) -> None:
    expected: dict[str, torch.Tensor] = {}

    class Average(TrainerEvents):
        """Averages the weights after each step of training."""

        def begin_pass(self, name: str, epoch: int, steps: int) -> None:
            self.train = name == "train"

        def step(self, loss: float, images_per_s: float) -> None:
            decay = min(0.5, (1 + trainer.step) / (10 + trainer.step))
            for name, value in trainer.model.state_dict().items() if self.train else ():
                expected[name] = decay * expected[name] + (1 - decay) * value

    trainer = trainer_of(config_file, "train.ema=0.5")
    expected.update({name: value.clone() for name, value in trainer.model.state_dict().items()})
    trainer.run(Average())
    served = load_checkpoint(str(trainer.checkpoint))[0]
    for name, value in served.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert trainer.val_loader is not None and trainer._history[-1]["val_loss"] == pytest.approx(
        mean_loss(served, config_file), rel=1e-5
    )


def mean_loss(model: torch.nn.Module, config_file: Path) -> float:
    import gpuflow

    with torch.no_grad(), gpuflow.load(config_file, "val") as loader:
        return float(torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in loader]).mean())


def test_best_is_the_checkpoint_with_the_best_validation(config_file: Path) -> None:
    trainer = trainer_of(config_file, "train.epochs=4", "train.lr=0.05")
    trainer.run(TrainerEvents())
    rows = table(trainer.checkpoint.with_name("metrics.csv"))
    best = max(rows, key=lambda row: float(row["val_accuracy"]))  # of equal ones the first
    state = torch.load(trainer.checkpoint.with_name("best.pt"), weights_only=True)
    assert (state["step"], len(rows)) == (int(best["step"]), 4)
    assert state["best"]["accuracy"] == float(best["val_accuracy"])


def test_the_rate_falls_in_steps(config_file: Path) -> None:
    trainer = trainer_of(config_file, "train.epochs=6", "train.schedule=step", "train.warmup_epochs=0")
    rates = []
    for trainer.step in range(18):
        rates.append(trainer._learning_rate())
    assert rates == pytest.approx([0.01] * 6 + [0.001] * 6 + [0.0001] * 6), "a third of the epochs each"
    warmed = trainer_of(config_file, "train.warmup_epochs=2")
    warmed.step = 2
    assert warmed._learning_rate() == pytest.approx(0.01 * 3 / 6)


def test_defaults_of_adamw(config_file: Path) -> None:
    document = yaml.safe_load(config_file.read_text())
    del document["train"]["lr"]
    config_file.write_text(yaml.safe_dump(document))
    trainer = trainer_of(config_file, "train.optimizer=adamw")
    assert trainer._highest_rate() == 1e-3 * 4 / 1024
    decays = {(group["weight_decay"], min(weight.ndim for weight in group["params"])) for group in _groups(trainer)}
    assert decays == {(0.05, 4), (0.0, 1)}, "squeezenet1_1 has convolutions and biases"


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return trainer._optimizer.param_groups


def test_losses_and_measures_are_those_of_torch_and_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 7, generator=generator)
    classes = torch.randint(0, 7, (40,), generator=generator)
    several = (torch.rand(40, 7, generator=generator) < 0.3).float()
    every = torch.ones(40, dtype=torch.bool)

    one = Objective(labels="class", loss="cross_entropy", outputs=7, smoothing=0.1)
    expected = F.cross_entropy(logits, classes, label_smoothing=0.1)
    torch.testing.assert_close(one.losses(logits, classes, smoothed=True).mean(), expected)
    torch.testing.assert_close(one.losses(logits, classes).mean(), F.cross_entropy(logits, classes))
    found = one.results(one.sums(logits, classes, every).tolist(), 40)
    top5 = metrics.top_k_accuracy_score(classes, logits, k=5, labels=range(7))
    assert found == pytest.approx({"accuracy": metrics.accuracy_score(classes, logits.argmax(1)), "top5": top5})
    mixed = F.one_hot(classes, 7).float()
    assert torch.equal(one.sums(logits, mixed, every), one.sums(logits, classes, every))

    counts = one.counts(logits, classes, every)
    recalls = metrics.recall_score(
        classes.numpy(), logits.argmax(1).numpy(), average=None, labels=range(7), zero_division=0
    )
    np.testing.assert_allclose(counts[2] / counts[0], recalls, rtol=1e-6)

    bce = Objective(labels="classes", loss="bce", outputs=7)
    torch.testing.assert_close(bce.losses(logits, several).mean(), F.binary_cross_entropy_with_logits(logits, several))
    found = bce.results(bce.sums(logits, several, every).tolist(), 40)
    assert found == pytest.approx({"f1": metrics.f1_score(several, logits > 0, average="micro")})

    numbers = Objective(labels="numbers", loss="smooth_l1", outputs=7)
    torch.testing.assert_close(numbers.losses(logits, several).mean(), F.smooth_l1_loss(logits, several))
    found = numbers.results(numbers.sums(logits, several, every).tolist(), 40)
    assert found == pytest.approx({"mae": metrics.mean_absolute_error(several, logits)})


@pytest.mark.parametrize("levels", [3, 10_000])
def test_mean_average_precision_is_that_of_scikit_learn(levels: int) -> None:
    """Few levels: many samples have the same score. A class that no sample has is left out."""
    average_precision_score = pytest.importorskip("sklearn.metrics").average_precision_score
    random = np.random.default_rng(levels)
    scores = random.integers(0, levels, (50, 6)).astype(np.float32)
    labels = (random.random((50, 6)) < 0.2).astype(np.float32)
    labels[:, 0] = 1
    expected = average_precision_score(labels, scores, average="macro")
    assert mean_average_precision(scores, labels) == pytest.approx(expected, abs=1e-9)
    labels[:, 4] = 0
    others = average_precision_score(np.delete(labels, 4, 1), np.delete(scores, 4, 1), average="macro")
    assert mean_average_precision(scores, labels) == pytest.approx(others, abs=1e-9)
    assert math.isnan(mean_average_precision(scores, np.zeros_like(labels)))


def test_the_mean_average_precision_of_a_validation_is_that_of_the_served_logits(photos: Path, tmp_path: Path) -> None:
    average_precision_score = pytest.importorskip("sklearn.metrics").average_precision_score
    file = of_kind("classes", photos, tmp_path)
    trainer = trainer_of(file, "pipelines.val.batch.size=5")
    result = trainer.run(TrainerEvents(), max_steps=3)
    assert result is not None
    with torch.no_grad(), gpuflow.load(file, "val", device="cpu") as loader:
        batches = [(trainer.model.eval()(images), labels) for images, labels in loader]
    logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert result.measures["map"] == pytest.approx(average_precision_score(labels, logits, average="macro"), abs=1e-6)
    [row] = table(trainer.checkpoint.with_name("metrics.csv"))
    assert float(row["val_map"]) == result.measures["map"] and "train_map" not in row


@pytest.mark.parametrize("objective", [("class", 7), ("classes", 7), ("numbers", 2)])
def test_samples_that_fill_a_step_change_no_measure(objective: tuple[Any, int]) -> None:
    labels, outputs = objective
    loss = {"class": "cross_entropy", "classes": "bce", "numbers": "mse"}[labels]
    one = Objective(labels=labels, loss=loss, outputs=outputs)
    logits = torch.randn(6, outputs)
    given = torch.randint(0, outputs, (6,)) if labels == "class" else torch.rand(6, outputs).round()
    valid = torch.arange(6) < 4
    every = torch.ones(4, dtype=torch.bool)
    assert torch.equal(one.sums(logits, given, valid), one.sums(logits[:4], given[:4], every))
    if labels != "numbers":
        assert torch.equal(one.counts(logits, given, valid), one.counts(logits[:4], given[:4], every))


def test_nan_is_never_the_best() -> None:
    numbers = Objective(labels="numbers", loss="mse", outputs=1)
    assert not numbers.is_better({"mae": math.nan}, None)
    assert not numbers.is_better({"mae": math.nan}, {"mae": 1.0})
    assert numbers.is_better({"mae": 0.5}, {"mae": 1.0})
    assert numbers.is_better({"mae": 0.5}, {"accuracy": 1.0})


# --- kinds of labels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "measure", "outputs"),
    [("class", "accuracy", 3), ("classes", "f1", 3), ("number", "mae", 1), ("vector", "mae", 2)],
)
def test_every_kind_of_label_is_trained_and_served(
    kind: str, measure: str, outputs: int, photos: Path, tmp_path: Path
) -> None:
    file = of_kind(kind, photos, tmp_path)
    trainer = trainer_of(file, "train.lr=0.001")
    result = trainer.run(TrainerEvents())
    assert result is not None and list(result.measures) == [measure, *(["map"] if kind == "classes" else [])]
    assert all(map(math.isfinite, (result.loss, *result.measures.values())))
    classes = trainer.checkpoint.with_name("classes.csv")
    assert classes.exists() == (kind in ("class", "classes"))
    if classes.exists():
        rows = table(classes)
        assert [row["class"] for row in rows] == list(trainer.train_loader.classes)
        assert sum(int(row["samples"]) for row in rows) == (16 if kind == "classes" else 12)
    config = read(file)
    engine = open_engine(
        ModelSpec(file=str(trainer.checkpoint.with_name("best.pt"))),
        image=config.programs["val"].result,
        device=torch.device("cpu"),
    )
    assert engine.run(torch.zeros(1, 3, 32, 32)).shape == (1, outputs)
    assert engine.info.classes == (trainer.train_loader.classes or None)
    assert engine.info.activation == {"class": "softmax", "classes": "sigmoid"}.get(kind, "none")
    engine.close()


@pytest.mark.parametrize(
    ("kind", "override", "expected"),
    [
        ("class", "train.loss=mse", "train.loss config.conflict, got 'mse'"),
        ("classes", "train.loss=cross_entropy", "train.loss config.conflict, got 'cross_entropy'"),
        ("number", "train.loss=bce", "train.loss config.conflict, got 'bce'"),
        ("number", "train.label_smoothing=0.1", "train.label_smoothing config.conflict, got 0.1"),
    ],
)
def test_a_loss_for_other_labels_is_located(
    kind: str, override: str, expected: str, photos: Path, tmp_path: Path
) -> None:
    file = of_kind(kind, photos, tmp_path)
    with pytest.raises(ConfigError) as caught:
        trainer_of(file, override)
    assert outline(caught.value) == f"{file}: {expected}"


# --- pretrained weights -----------------------------------------------------------------------------------------------

CACHED = "squeezenet1_1-b8a52dc0.pth"


def test_weights_from_a_file_but_for_the_head(config_file: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    theirs = models.squeezenet1_1(num_classes=10).state_dict()
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in theirs.items()}}, tmp_path / "a.pth"
    )
    new = trainer_of(config_file).model.state_dict()
    trainer = trainer_of(config_file, f"train.pretrained={tmp_path / 'a.pth'}")
    for name, value in trainer.model.state_dict().items():
        is_head = name.startswith("classifier.1.")
        assert torch.equal(value, new[name] if is_head else theirs[name]), name
    assert trainer.header[0].endswith(f"weights of {tmp_path}/a.pth but for classifier.1.bias, classifier.1.weight")


def test_weights_of_an_earlier_run_are_its_average(config_file: Path, tmp_path: Path) -> None:
    first = trainer_of(config_file, "train.ema=0.9")
    first.run(TrainerEvents(), max_steps=1)
    second = trainer_of(config_file, f"train.pretrained={first.checkpoint}", f"train.out={tmp_path}/second")
    assert equal(dict(second.model.state_dict()), dict(torch.load(first.checkpoint, weights_only=True)["ema"]))


def test_weights_of_the_cache_are_never_downloaded_unasked(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    for wanted in ("true", "IMAGENET1K_V1"):
        with pytest.raises(ConfigError) as caught:
            trainer_of(config_file, f"train.pretrained={wanted}")
        assert f"no such file: {tmp_path}/cache/hub/checkpoints/{CACHED}" in str(caught.value)
        assert outline(caught.value).startswith(f"{config_file}: train.pretrained config.rule, got ")
    folder = tmp_path / "cache" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    theirs = models.squeezenet1_1().state_dict()
    torch.save(theirs, folder / CACHED)
    for wanted in ("true", "IMAGENET1K_V1", "download"):
        trainer = trainer_of(config_file, f"train.pretrained={wanted}")
        weights = trainer.model.state_dict()
        assert torch.equal(weights["features.0.weight"], theirs["features.0.weight"])
        assert f"weights of {folder / CACHED} but for" in trainer.header[0]


def test_files_that_are_no_weights_of_the_model_are_located(config_file: Path, tmp_path: Path) -> None:
    torch.save(models.resnet18(num_classes=3).state_dict(), tmp_path / "other.pth")
    (tmp_path / "damaged.pth").write_bytes(b"PK" + bytes(100))
    for name in ("other.pth", "damaged.pth", "missing.pth"):
        with pytest.raises(ConfigError) as caught:
            trainer_of(config_file, f"train.pretrained={tmp_path / name}")
        assert outline(caught.value).startswith(f"{config_file}: train.pretrained config.rule, got ")
        assert f"there is no file {tmp_path / name}" in str(caught.value) or name != "missing.pth"


def test_a_resumed_run_needs_no_pretrained_weights(config_file: Path, tmp_path: Path) -> None:
    torch.save(models.squeezenet1_1(num_classes=3).state_dict(), tmp_path / "a.pth")
    option = f"train.pretrained={tmp_path / 'a.pth'}"
    first = trainer_of(config_file, option)
    assert first.header[0].endswith(f"weights of {tmp_path}/a.pth")
    first.run(TrainerEvents(), max_steps=2)
    (tmp_path / "a.pth").unlink()
    resumed = trainer_of(config_file, option, resume=True)
    assert equal(dict(resumed.model.state_dict()), dict(first.model.state_dict()))
    assert resumed.header[0].endswith(f"{first.checkpoint} at step 2")


def test_names_of_densenet_before_torch_1_are_understood(config_file: Path, tmp_path: Path) -> None:
    theirs = models.densenet121(num_classes=3).state_dict()
    old = {name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): value for name, value in theirs.items()}
    torch.save(old, tmp_path / "a.pth")
    file = "train.model=densenet121", f"train.pretrained={tmp_path / 'a.pth'}"
    assert equal(dict(trainer_of(config_file, *file).model.state_dict()), dict(theirs))


# --- what belongs to other libraries ----------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_tensorboard_that_is_not_installed_is_named(config_file: Path) -> None:
    with pytest.raises(MissingExtra, match=r"train.tensorboard needs tensorboard, .* 'gpuflow\[tensorboard\]'"):
        trainer_of(config_file, "train.tensorboard=true")


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_timm_that_is_not_installed_is_named(config_file: Path) -> None:
    with pytest.raises(GpuflowError, match=r"a model of timm needs timm, .* 'gpuflow\[timm\]'"):
        trainer_of(config_file, "train.model=timm:resnet18")


# --- the next command -------------------------------------------------------------------------------------------------


def test_the_next_command_goes_on_or_uses_the_model(config_file: Path) -> None:
    trainer = trainer_of(config_file)
    trainer.run(TrainerEvents(), max_steps=1)
    assert trainer.next_command("x.yaml", ["train.lr=1"]) == ["gpuflow", "train", "x.yaml", "train.lr=1", "--resume"]
    trainer = trainer_of(config_file, resume=True)
    trainer.run(TrainerEvents())
    best = str(trainer.checkpoint.with_name("best.pt"))
    assert trainer.next_command("x.yaml", []) == [
        "gpuflow",
        "export",
        "x.yaml",
        "--checkpoint",
        best,
        "--pt2",
        f"{best}2",
    ]
