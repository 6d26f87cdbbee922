"""Two processes on two NVIDIA GPUs, with NCCL. With `-s`, pytest shows their speed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.datasets import make_photos, truncate, write_config
from tests.ranks import reports, torchrun

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs, torch sees {GPUS}"),
]

PHOTOS, BATCH, EPOCHS = 390, 32, 3
"""Two ranks make seven steps an epoch, in the last of which 58 samples are wrapped: one rank has none of its own."""
STEPS = EPOCHS * 7
SECONDS = 240.0


def written(directory: Path) -> Path:
    make_photos(directory / "photos", classes=3, each=PHOTOS // 3)
    fit = {"model": "resnet18", "epochs": EPOCHS, "lr": 0.01, "out": str(directory / "run")}
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 64}}, {"flip": {"horizontal": 0.5}}, {"normalize": {}}]
    val = [{"decode": {}}, {"resize": {"shorter": 72}}, {"center_crop": {"size": 64}}, {"normalize": {}}]
    return write_config(
        directory / "x.yaml", directory / "photos", train=stages, val=val, fit=fit, batch={"size": BATCH}
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu_ranks")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each of two ranks reports of a whole training."""
    done = torchrun("tests.ranks", written(directory), directory, "cuda", STEPS, seconds=SECONDS)
    assert (done.code, done.left) == (0, []), done.err
    return reports(directory)


def test_two_ranks_train_one_model(ranks: list[dict[str, Any]], directory: Path) -> None:
    first, second = ranks
    assert first["weights"] == second["weights"]
    assert first["step"] == second["step"] == STEPS
    assert first["finite"] and second["finite"]
    for name in ("train", "val"):
        for epoch in map(str, range(EPOCHS)):
            seen = [set(rank[name][epoch]) for rank in ranks]  # some of train twice, for BatchNorm's statistics
            assert sorted([*seen[0], *seen[1]]) == list(range(PHOTOS)), f"{name}, epoch {epoch}"
    passes = [[name, epoch] for epoch in range(EPOCHS) for name in ("train", "val")]
    assert [result[:2] for result in first["results"]] == passes
    assert [result[:4] for result in first["results"]] == [result[:4] for result in second["results"]]
    state = torch.load(directory / "run" / "last.pt", weights_only=True, map_location="cpu")
    assert state["step"] == STEPS
    assert all(bool(torch.isfinite(value).all()) for value in state["model"].values())
    for name, epoch, loss, accuracy, images_per_s in first["results"]:
        print(
            f"\n{name:5} epoch {epoch}: loss {loss:.3f}  accuracy {accuracy:.3f}  {images_per_s:,.0f} images/s", end=""
        )


def test_each_file_is_checked_by_one_rank(ranks: list[dict[str, Any]]) -> None:
    """In three epochs of training and of validation, each with its own loader. Wrapped samples may be checked twice."""
    checked = sum(rank["checked"] for rank in ranks)
    assert 2 * PHOTOS <= checked <= 2 * (PHOTOS + 58)


def test_each_rank_loads_to_its_own_gpu(ranks: list[dict[str, Any]]) -> None:
    assert [report["loaded_to"] for report in ranks] == [["cuda:0"], ["cuda:1"]]
    assert [report["device"] for report in ranks] == ["cuda:0", "cuda:1"]


def test_a_loader_touches_no_other_gpu(ranks: list[dict[str, Any]]) -> None:
    assert [report["in_use_after_loading"] for report in ranks] == [[0], [1]]


def test_training_touches_no_other_gpu(ranks: list[dict[str, Any]]) -> None:
    assert [report["in_use_after_training"] for report in ranks] == [[0], [1]]
    reserved = [report["reserved"] for report in ranks]
    assert [[index for index, size in enumerate(sizes) if size] for sizes in reserved] == [[0], [1]], reserved


def test_the_command_trains_on_two_gpus_and_goes_on_on_one(tmp_path: Path) -> None:
    config, out = written(tmp_path), tmp_path / "run"
    done = torchrun("gpuflow", "train", config, "--max-steps", 10, seconds=SECONDS)
    assert (done.code, done.left) == (0, []), done.err
    lines = [re.sub(r"[\d.,]+", "#", line) for line in done.out.splitlines() if line.startswith("epoch")]
    expected = [f"epoch #  {name:5}  loss #  accuracy #  # images/s" for name in ("train", "val", "train")]
    assert lines == [*expected[:2], f"{expected[2]}  (steps # to # of #)"]
    assert done.out.count(f"saved {out}/last.pt at step 10, ") == 1
    done = torchrun("gpuflow", "train", config, "--resume", "--max-steps", 2, ranks=1, seconds=SECONDS)
    assert (done.code, done.left) == (0, []), done.err
    assert f"saved {out}/last.pt at step {13 + 6 + 2}, " in done.out, "the first took 3 x 64 of the epoch's 390 samples"


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    config = written(tmp_path)
    broken = sorted((tmp_path / "photos" / "class_0").iterdir())[5]
    truncate(broken)
    done = torchrun("gpuflow", "train", config, "pipelines.train.on_error=raise", seconds=SECONDS)
    assert (done.code, done.left) == (1, []), done.err
    assert re.search(rf"^error: rank \d: {broken} \(sample 5\): decode: ", done.err, flags=re.MULTILINE), done.err
    assert done.seconds < 90, "no rank waits until the timeout"


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    command = ("gpuflow", "train", written(tmp_path), "train.epochs=100000")
    done = torchrun(*command, interrupt_at="epoch 1  val", seconds=SECONDS)
    assert (done.code, done.left) == (1, []), done.err
    assert done.seconds < 20
    assert "Unable to shutdown" not in done.err


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    done = torchrun("gpuflow", "train", written(tmp_path), "--device", "cuda", ranks=GPUS + 1, seconds=SECONDS)
    assert (done.code, done.left) == (1, []), done.err
    text = f"device 'cuda' means a GPU for each of this host's {GPUS + 1} ranks, and torch sees {GPUS}; "
    assert text in done.err
