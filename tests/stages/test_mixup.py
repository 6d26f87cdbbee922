"""mixup: draws as timm's Mixup does, from its own numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gpuflow
from gpuflow.errors import ConfigError
from gpuflow.pipeline.records import Field
from gpuflow.pipeline.stage import Mixing, Mixture
from gpuflow.stages import CenterCrop, Decode, Mixup, Normalize
from gpuflow.stages.mixup import symmetric_beta
from tests.datasets import VAL, make_photos, write_config
from tests.mixing import CLASSES, batch_of, mixed, timm_box
from tests.running import keys_of, program_of
from tests.texts import outline

HEIGHT, WIDTH, COUNT = 60, 80, 2000


def draw(stage: Mixing, count: int = COUNT, *, seed: int = 0, valid: NDArray[np.bool_] | None = None) -> Mixture:
    keys = keys_of(count, seed=seed).stage(stage.stage_name, 0)
    return stage.draw(keys, HEIGHT, WIDTH, np.ones(count, bool) if valid is None else valid)


# --- Beta -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 0.8, 1.0, 1.5, 4.0, 100.0])
def test_the_share_has_the_distribution_beta(alpha: float) -> None:
    """Against numpy's numbers by the test of Kolmogorov and Smirnov at a level of one in 10^5, and its moments."""
    count = 20_000
    uniform = keys_of(count).stage("beta", 0).uniform(2)
    ours = symmetric_beta(np.full(count, alpha), uniform[:, 0], uniform[:, 1])
    theirs = np.sort(np.random.default_rng(0).beta(alpha, alpha, count))
    assert (ours >= 0).all() and (ours <= 1).all()
    places = np.linspace(0, 1, 999)[1:-1]
    distance = np.abs(np.searchsorted(np.sort(ours), places) - np.searchsorted(theirs, places)).max() / count
    assert distance < 2.5 * math.sqrt(2 / count)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(ours.mean() - 0.5) < 5 * math.sqrt(variance / count)
    assert abs(ours.var() / variance - 1) < 0.1


@pytest.mark.parametrize("alpha", [0.001, 1.0, 1000.0])
def test_extreme_numbers_give_shares_within_bounds(alpha: float) -> None:
    numbers = np.array([0.0, 2.0**-32, 0.25, 0.5, 0.75, 1 - 2.0**-32])
    first, second = (axis.ravel() for axis in np.meshgrid(numbers, numbers))
    shares = symmetric_beta(np.full(len(first), alpha), first, second)
    assert ((shares >= 0) & (shares <= 1)).all()


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_partners_are_those_of_the_flipped_batch() -> None:
    assert draw(Mixup(), 6).partners.tolist() == [5, 4, 3, 2, 1, 0]
    assert draw(Mixup(), 5).partners.tolist() == [4, 3, 2, 1, 0]
    valid = np.array([True, False, True, True, False, True])
    assert draw(Mixup(), 6, valid=valid).partners.tolist() == [5, 1, 3, 2, 4, 0]
    assert not draw(Mixup(), 1).changed.any()


def test_modes_say_who_shares_numbers() -> None:
    def shares(mode: Any, count: int) -> NDArray[np.float64]:
        return draw(Mixup(mode=mode), count).weights

    assert len(set(shares("batch", 8).tolist())) == 1
    pair = shares("pair", 8)
    assert pair.tolist() == pair[::-1].tolist() and len(set(pair.tolist())) == 4
    assert len(set(shares("elem", 8).tolist())) == 8
    assert shares("batch", 7)[[0, 6]].tolist() == [shares("elem", 7)[0]] * 2
    for mode in ("batch", "pair", "elem"):
        assert shares(mode, 7)[3] == 1, "the middle one of an odd number has no partner"


def test_probabilities_are_those_asked_for() -> None:
    mixture = draw(Mixup(cutmix_alpha=1.0, probability=0.6, switch_probability=0.25, mode="elem"), 10_000)
    moved = mixture.partners != np.arange(10_000)
    boxed = mixture.boxes[:, 2] > 0
    assert abs(moved.mean() - 0.6) < 0.03
    assert abs(boxed[moved].mean() - 0.25) < 0.03
    assert (mixture.weights[boxed] == 1).all() and (mixture.weights[moved & ~boxed] < 1).all()
    assert not draw(Mixup(cutmix_alpha=0.0, switch_probability=1.0, mode="elem")).boxes.any()
    assert not draw(Mixup(probability=0.0, cutmix_alpha=1.0)).changed.any()


def test_weights_are_exact_in_float32() -> None:
    weights = draw(Mixup(mode="elem", alpha=0.3)).weights
    assert (weights.astype(np.float32).astype(np.float64) == weights).all()


# --- timm itself, where it is installed -------------------------------------------------------------------------------


class Numbers:
    """numpy's generator with given numbers, in the order in which timm asks."""

    def __init__(self, *, uniform: list[Any], beta: list[Any], integers: list[Any]) -> None:
        self.uniform, self.betas, self.integers = uniform, beta, integers

    def rand(self, *size: int) -> Any:
        return self.uniform.pop(0)

    def beta(self, a: float, b: float, size: int | None = None) -> Any:
        return self.betas.pop(0)

    def randint(self, low: int, high: int, size: int | None = None) -> Any:
        return self.integers.pop(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("lam", [0.2, 0.75])
@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_timm_gives_the_same_on_the_same_numbers(
    mode: str, boxed: bool, lam: float, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = pytest.importorskip("timm.data.mixup", reason="timm is not installed")
    lam = float(np.float32(lam))
    images, labels = batch_of(6)
    (y, x, height, width), share = timm_box(13, 17, lam, 3, 15)
    theirs = timm.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, mode=mode, label_smoothing=smoothing, num_classes=CLASSES)
    if mode == "batch":
        numbers = Numbers(uniform=[0.0, 0.0 if boxed else 1.0], beta=[lam], integers=[3, 15])
    else:
        count = 6 if mode == "elem" else 3
        uniform = [np.full(count, 0.0 if boxed else 1.0), np.zeros(count)]
        numbers = Numbers(uniform=uniform, beta=[np.full(count, lam)] * 2, integers=[3, 15] * count)
    monkeypatch.setattr(timm.np, "random", numbers)
    expected = theirs(images.clone(), torch.from_numpy(labels))
    monkeypatch.undo()
    mixture = Mixture(
        partners=np.arange(6)[::-1].copy(),
        weights=np.full(6, 1.0 if boxed else lam),
        boxes=np.tile([y, x, height, width] if boxed else [0, 0, 0, 0], (6, 1)),
        shares=np.full(6, share if boxed else lam),
    )
    result, probabilities = mixed(Mixup(label_smoothing=smoothing), mixture, images, labels)
    assert torch.equal(result, expected[0])
    torch.testing.assert_close(torch.from_numpy(probabilities), expected[1], rtol=0, atol=1e-6)


# --- bad configurations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"alpha": 0.0}, "mixup.alpha config.range, got 0.0"),
        ({"cutmix_alpha": -1.0}, "mixup.cutmix_alpha config.range, got -1.0"),
        ({"probability": 1.5}, "mixup.probability config.range, got 1.5"),
        ({"label_smoothing": -0.1}, "mixup.label_smoothing config.range, got -0.1"),
    ],
)
def test_parameters_out_of_range(parameters: dict[str, float], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mixup(**parameters)  # type: ignore[arg-type]
    assert outline(caught.value) == expected


def test_uint8_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        program_of(Decode(), CenterCrop(size=8), Mixup())
    assert outline(caught.value) == "test[2].mixup stage.order"
    assert program_of(Decode(), CenterCrop(size=8), Normalize(dtype="float16"), Mixup()).mixings


class Unlabelled:
    """A source whose samples have no class: what is asked of it before the first sample is read."""

    def __init__(self, source: Any, **known: Any) -> None:
        self._source, self._known = source, known

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return self._known[name] if name in self._known else getattr(self._source, name)


@pytest.mark.parametrize(
    "known",
    [
        {"has_labels": False},
        {"labels": np.zeros((4, 3), np.float32)},
        {"fields": (Field(name="boxes", type="boxes"),)},
    ],
)
def test_samples_without_one_class_each_are_not_mixed(known: dict[str, Any], tmp_path: Path) -> None:
    from gpuflow.config import read_config
    from gpuflow.loader.assemble import build_loader, open_whole
    from gpuflow.stages import STAGES

    make_photos(tmp_path / "photos", classes=2, each=2)
    path = write_config(tmp_path / "x.yaml", tmp_path / "photos", train=[*VAL, {"mixup": {}}])
    config = read_config(path, STAGES)
    source: Any = Unlabelled(open_whole(config), **known)
    with pytest.raises(ConfigError) as caught:
        build_loader(config, "train", rank=0, world_size=1, device="cpu", whole=source)
    assert outline(caught.value) == f"{path}: pipelines.train.stages[4].mixup config.conflict"
    build_loader(config, "val", rank=0, world_size=1, device="cpu", whole=source).close()


def test_a_pipeline_that_mixes_loads(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=2, each=2)
    path = write_config(tmp_path / "x.yaml", tmp_path / "photos", train=[*VAL, {"mixup": {}}, "cutmix"])
    with gpuflow.load(path, "train") as loader:
        (batch,) = loader
    assert batch.labels.shape == (4, 2)
