"""One short test of each adapter with a real object of its library; `tests/integrations` tests them at length."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder

import gpuflow
from gpuflow.errors import ConfigError, MissingExtra
from gpuflow.integrations.accelerate import AccelerateLoader
from gpuflow.integrations.timm import create_loader
from gpuflow.loader.batch import Batch
from tests.datasets import make_photos, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 photographs of 2 classes, named by numbers, in batches of 4."""
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder / "photos", classes=2, each=6)
    for label in range(2):
        (folder / "photos" / f"class_{label}").rename(folder / "photos" / f"{label + 10}")
    return write_config(folder / "x.yaml", folder / "photos")


# --- Lightning, Accelerate, torchdata ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
def test_lightning_trains_and_validates(config: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from gpuflow.integrations.lightning import DataModule

    seen: dict[str, list[int]] = {"train": [], "val": []}

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen["train"] += batch.indices.tolist()
            loss: torch.Tensor = torch.nn.functional.cross_entropy(self.layer(batch[0].mean((2, 3))), batch[1])
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen["val"] += batch.indices.tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, num_sanity_val_steps=0, default_root_dir=config.parent, **silent
    )
    trainer.fit(Model(), datamodule=DataModule(config))
    assert sorted(seen["train"]) == seen["val"] == list(range(12))


@pytest.mark.filterwarnings("default")
def test_accelerate_saves_and_loads_a_place_within_an_epoch(config: Path, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from gpuflow.integrations.accelerate import load

    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(load(accelerator, config))
    batches = iter(loader)
    first = next(batches).indices.tolist()
    accelerator.save_state(str(tmp_path / "state"))
    batches.close()
    accelerator.load_state(str(tmp_path / "state"))
    rest = [i for batch in loader for i in batch.indices.tolist()]
    assert len(rest) == 8 and sorted(first + rest) == list(range(12))
    with pytest.raises(AttributeError, match=r"skip_first_batches is not needed"):
        accelerate.skip_first_batches(loader, 1)
    loader.close()


class Metrics:
    """Stands for Accelerate's GradientState: `gather_for_metrics` asks it for the loader that is being iterated."""

    def __init__(self) -> None:
        self.loaders: list[AccelerateLoader] = []

    def _add_dataloader(self, loader: AccelerateLoader) -> None:
        self.loaders.append(loader)

    def _remove_dataloader(self, loader: AccelerateLoader) -> None:
        self.loaders.remove(loader)

    def gathered(self, ranks: Sequence[Iterable[Batch]]) -> list[int]:
        """What `gather_for_metrics` returns of the samples' numbers in an epoch of these ranks."""
        found: list[int] = []
        for batches in zip(*ranks, strict=True):
            step = torch.cat([batch.indices for batch in batches])
            last = self.loaders[-1]
            found += step[: last.remainder if last.end_of_dataloader and last.remainder > 0 else None].tolist()
        return found


@pytest.mark.parametrize(
    ("weights", "taken", "ranks", "count"),
    [
        ("", 0, 2, 12),
        ("", 1, 2, 8),
        ("", 2, 3, 4),
        ("{file: weights.txt, replacement: false, samples: 10}", 0, 2, 10),
        ("{file: weights.txt, samples: 9}", 0, 3, 9),
    ],
)
def test_accelerate_gathers_each_sample_that_is_left_once(
    weights: str, taken: int, ranks: int, count: int, config: Path
) -> None:
    """taken: steps of one rank before. The samples left, and those of an epoch drawn by weights, are not as many as
    the source has."""
    (config.parent / "weights.txt").write_text("1\n" * 12)
    overrides = [f"source.weights={weights.replace('weights.txt', str(config.parent / 'weights.txt'))}"] * bool(weights)
    with gpuflow.load(config, rank=0, world_size=1, overrides=overrides) as before:
        seen = [i for batch in islice(before, taken) for i in batch.indices.tolist()]
        state = before.state_dict()
    metrics = Metrics()
    state_of_accelerate: Any = metrics
    loaders = [
        AccelerateLoader(gpuflow.load(config, rank=i, world_size=ranks, overrides=overrides), state_of_accelerate)
        for i in range(ranks)
    ]
    for loader in loaders:
        loader.load_state_dict(state)
    found = metrics.gathered(loaders)
    assert len(found) == count and metrics.loaders == []
    if "replacement" in weights or not weights:
        assert len({*seen, *found}) == len(seen) + len(found)
    for loader in loaders:
        loader.close()


def test_torchdata_takes_a_loader_as_stateful(config: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful", reason="torchdata is not installed")
    with gpuflow.load(config) as loader:
        assert isinstance(loader, stateful.Stateful)


# --- timm -------------------------------------------------------------------------------------------------------------


def test_timms_parameters_become_stages(config: Path) -> None:
    dataset = ImageFolder(str(config.parent / "photos"))
    options: dict[str, Any] = {
        "hflip": 0.5,
        "re_prob": 0.2,
        "color_jitter": (0.1, 0.2, 0.3, 0.1),
        "grayscale_prob": 0.1,
    }
    loader = create_loader(dataset, (3, 24, 24), 4, is_training=True, scale=(0.5, 1), device="cpu", **options)
    assert (len(loader), len(loader.dataset), loader.mixup_enabled) == (3, 12, False)
    assert loader.dataset.classes == ("10", "11")
    names = [stage.stage_name for stage in loader.loader.pipeline.stages]  # type: ignore[union-attr]
    jittered = ["color_jitter", "grayscale", "random_erasing", "normalize"]
    assert names == ["decode", "random_resized_crop", "flip", *jittered]
    loader.sampler.set_epoch(3)
    batches = list(loader)
    assert {batch.epoch for batch in batches} == {3} and batches[0].images.shape == (4, 3, 24, 24)
    labels = {int(i): int(label) for batch in batches for i, label in zip(batch.indices, batch.labels, strict=True)}
    assert labels == {i: i // 6 for i in range(12)}
    loader.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"auto_augment": "rand-m9-mstd0.5-inc1"}, ["random_resized_crop", "flip", "rand_augment", "normalize"]),
        ({"auto_augment": "original-mstd0.5"}, ["random_resized_crop", "flip", "auto_augment", "normalize"]),
        (
            {"auto_augment": "3a", "interpolation": "bicubic"},
            ["random_resized_crop", "flip", "auto_augment", "color_jitter", "normalize"],
        ),
        (
            {"augment": [{"grayscale": {"probability": 0.1}}], "re_prob": 0.9, "re_mode": "rand", "re_count": 3},
            ["random_resized_crop", "flip", "grayscale", "normalize", "noise_erasing"],
        ),
        (
            {"train_crop_mode": "rkrc", "hflip": 0, "color_jitter": None, "re_prob": 0.9, "re_count": 2},
            ["cover_resize", "center_crop", "random_erasing", "normalize"],
        ),
        ({"train_crop_mode": "rkrr", "color_jitter": None}, ["cover_resize", "random_crop", "flip", "normalize"]),
    ],
)
def test_timms_recipes_become_stages(options: dict[str, Any], expected: list[str], config: Path) -> None:
    loader = create_loader(config, 24, 4, is_training=True, device="cpu", **options)
    assert [stage.stage_name for stage in loader.loader.pipeline.stages] == ["decode", *expected]  # type: ignore[union-attr]
    assert all(images.shape == (4, 3, 24, 24) and not images.isnan().any() for images, _ in loader)
    loader.close()


def test_a_file_gives_timms_loader_its_source(config: Path) -> None:
    loader = create_loader(config, 24, 5, crop_pct=0.75, device="cpu")
    names = [stage.stage_name for stage in loader.loader.pipeline.stages]  # type: ignore[union-attr]
    assert names == ["decode", "resize", "center_crop", "normalize"]
    assert [len(labels) for _, labels in loader] == [5, 5, 2]
    loader.close()


def test_the_loader_has_what_timms_script_passes_and_asks_for(config: Path) -> None:
    """`train.py` of timm 1.0.29 passes a seed for batches of several sizes, also where all have one size."""
    given: dict[str, Any] = {"batch_choice_seed": 42, "batch_choice_schedule": "constant", "num_batches": None}
    loader = create_loader(config, 24, 4, is_training=True, device="cpu", input_size_choices=None, **given)
    loader.batch_sampler.set_epoch(3)
    assert {batch.epoch for batch in loader} == {3}
    loader.close()


TRAINING = {"is_training": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            TRAINING | {"interpolation": "random"},
            "interpolation must be one of bilinear, bicubic, got 'random'",
        ),
        (TRAINING | {"auto_augment": "augmix-m5-w4-d2"}, "auto_augment blends several augmented copies of an image"),
        (TRAINING | {"auto_augment": "ranf-m9"}, "auto_augment must begin with rand, original, originalr, v0, v0r, 3a"),
        (TRAINING | {"auto_augment": "rand-x9"}, "auto_augment has an unknown section 'x9'; timm knows mstd, m, n, p"),
        (TRAINING | {"auto_augment": "rand-m9.5"}, "auto_augment has a section 'm9.5' without a number of type int"),
        (
            TRAINING | {"interpolation": "bicubic", "auto_augment": "v0"},
            "auto_augment warps with interpolation 'bicubic', and warps here are bilinear, got 'v0'",
        ),
        (
            TRAINING | {"augment": [{"grayscale": {}}], "auto_augment": "rand-m9"},
            "auto_augment must be None where augment is given, got 'rand-m9'",
        ),
        (TRAINING | {"re_prob": 0.1, "re_mode": "noise"}, "re_mode must be one of const, rand, pixel, got 'noise'"),
        (TRAINING | {"re_prob": 0.1, "re_split": True}, "re_split must be false, got true"),
        (TRAINING | {"train_crop_mode": "rk"}, "train_crop_mode must be one of rrc, rkrc, rkrr, got 'rk'"),
        (TRAINING | {"num_aug_repeats": 3}, "num_aug_repeats must be 0, got 3"),
        (TRAINING | {"num_aug_splits": 2}, "num_aug_splits must be 0, got 2"),
        (TRAINING | {"collate_fn": list}, "collate_fn must be None or timm's FastCollateMixup"),
        (TRAINING | {"input_size_choices": (16, 24)}, "input_size_choices is not offered: all batches have one size"),
        ({"crop_mode": "border"}, "crop_mode must be 'center' or 'squash', got 'border'"),
        ({"crop_border_pixels": 4}, "crop_border_pixels must be 0, got 4"),
        ({"input_size": (3, 24, 32)}, "input_size must be a square where crop_mode is 'center', got [3, 24, 32]"),
        ({"input_size": (4, 24, 24)}, "input_size must have 1 or 3 channels, got [4, 24, 24]"),
        ({"tf_preprocessing": True}, "tf_preprocessing is not offered, and must be false, got true"),
        ({"img_dtype": torch.float64}, "img_dtype must be float32, float16 or bfloat16, got 'torch.float64'"),
        ({"dataset": [1, 2]}, "dataset must be a dataset of files with `samples` and `class_to_idx`, or the path of a"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str, config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        create_loader(**{"dataset": config, "input_size": 24, "batch_size": 4, "device": "cpu", **options})
    [problem] = caught.value.problems
    assert str(problem).startswith(f"timm.create_loader: {message}")
    assert problem.path == (next(reversed(options)),) and problem.code == "config.conflict"


def test_a_parameter_that_timm_lacks_is_a_type_error(config: Path) -> None:
    with pytest.raises(TypeError, match=r"^create_loader\(\) has no parameter 'batchsize'$"):
        create_loader(config, 24, 4, batchsize=4)


# --- Ray --------------------------------------------------------------------------------------------------------------


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "gpuflow.integrations.ray", raising=False)
    with pytest.raises(MissingExtra, match=r"Ray Train, which is not installed; pip install 'gpuflow\[ray\]'"):
        importlib.import_module("gpuflow.integrations.ray")
