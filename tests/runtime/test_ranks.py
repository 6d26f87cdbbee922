"""Several processes train one model: on the CPU, with Gloo. The slow tests start them by torchrun, as users do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import gpuflow
from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError, GpuflowError, LoaderError
from gpuflow.runtime.ranks import Group, Ranks, process_group
from gpuflow.stages import STAGES
from gpuflow.training.trainer import PassResult, Trainer, TrainerEvents, _model
from tests.datasets import make_photos, nothing_left_behind, one_torch_thread, truncate, write_config
from tests.forking import Interpreter
from tests.ranks import Notes, Seen, forked, reports, sample_of, torchrun, without_dropout

PHOTOS, BATCH = 27, 4
"""Two ranks make four steps an epoch, in the last of which five samples are wrapped; one rank makes seven."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread(seconds=100):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distributed") / "photos"
    make_photos(root, classes=3, each=PHOTOS // 3)
    return root


@pytest.fixture
def config_file(photos: Path, tmp_path: Path) -> Path:
    return written(tmp_path, photos)


def written(directory: Path, photos: Path) -> Path:
    fit = {"model": "squeezenet1_1", "epochs": 2, "lr": 0.01, "out": str(directory / "run"), "save_every": {"steps": 1}}
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 32}}, {"normalize": {}}]
    val = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}}]
    return write_config(directory / "x.yaml", photos, train=stages, val=val, fit=fit, batch={"size": BATCH})


def read(path: Path, *overrides: str) -> Config:
    return read_config(path, STAGES, overrides)


class Steps(TrainerEvents):
    """(pipeline, epoch, steps) of each pass that was begun, and the results of those that ended."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int, int]] = []
        self.results: list[PassResult] = []

    def begin_pass(self, name: str, epoch: int, steps: int) -> None:
        self.passes.append((name, epoch, steps))

    def end_pass(self, name: str, epoch: int, result: PassResult) -> None:
        self.results.append(result)


# --- who is who -------------------------------------------------------------------------------------------------------


def test_ranks_come_from_torchruns_environment() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Ranks.from_environment(environment) == Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert Ranks.from_environment({}) == Ranks(rank=0, world_size=1, local_rank=None, local_world_size=1)
    assert Ranks.from_environment({"LOCAL_RANK": "3", "RANK": ""}) == Ranks(local_rank=3)


@pytest.mark.parametrize(
    ("environment", "problems"),
    [
        (
            {"RANK": "one", "WORLD_SIZE": "0"},
            ["RANK must be a whole number >= 0, got 'one'", "WORLD_SIZE must be a whole number >= 1, got '0'"],
        ),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK must be a whole number >= 0, got '-1'"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK must be below WORLD_SIZE, got 2 of 2"]),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK must be below LOCAL_WORLD_SIZE, got 4 of 2"]),
        ({"RANK": "1"}, ["WORLD_SIZE must be set, because RANK is (1)"]),
        ({"WORLD_SIZE": "2"}, ["RANK must be set, because WORLD_SIZE is (2)"]),
    ],
)
def test_an_environment_that_cannot_be(environment: dict[str, str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Ranks.from_environment(environment)
    assert str(caught.value).splitlines() == [
        f"environment variable {problem}; let torchrun set it, or unset it" for problem in problems
    ]


def test_a_loader_says_so_too(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"^environment variable RANK must be set"):
        gpuflow.load(config_file)


def test_the_local_rank_is_the_gpu() -> None:
    assert [Ranks(local_rank=rank, local_world_size=4).gpu(4) for rank in range(4)] == [0, 1, 2, 3]
    assert Ranks(local_rank=1).gpu(2) == 1


@pytest.mark.parametrize("ranks", [Ranks(local_rank=0, local_world_size=4), Ranks(local_rank=3)])
def test_each_rank_needs_a_gpu_of_its_own(ranks: Ranks) -> None:
    with pytest.raises(LoaderError) as caught:
        ranks.gpu(2)
    assert str(caught.value) == (
        "device 'cuda' means a GPU for each of this host's 4 ranks, and torch sees 2; "
        "start 2 (torchrun --nproc-per-node 2) or use device='cpu'"
    )


def test_ranks_do_not_choose_their_gpus(config_file: Path) -> None:
    for ranks in Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2), Ranks(rank=1, world_size=2):
        with pytest.raises(LoaderError) as caught:
            Trainer(read(config_file), device="cuda:0", ranks=ranks)
        assert str(caught.value) == (
            "--device must leave the GPU to LOCAL_RANK where there are 2 ranks, got 'cuda:0'; use --device cuda"
        )


# --- the group --------------------------------------------------------------------------------------------------------


def test_who_is_alone_waits_for_nobody() -> None:
    model, total = torch.nn.Linear(2, 2), torch.ones(3)
    with nothing_left_behind(), process_group(Ranks(), CPU, timeout_seconds=1) as group:
        assert isinstance(group, Group)
        assert group.replicate(model) is model
        group.sum(total)
        group.share(model.parameters())
        group.wait()
        assert not torch.distributed.is_initialized()
    assert total.tolist() == [1, 1, 1]


def test_others_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    ranks = Ranks(rank=0, world_size=2)
    with pytest.raises(GpuflowError) as caught, process_group(ranks, CPU, timeout_seconds=0.2):
        raise AssertionError("there is no group")
    assert re.fullmatch(
        r"rank 0 of 2 is cut off from the others: Timed out after \d+ seconds waiting for clients\. 1/2 clients "
        r"joined\.; see the error of the rank that ended first, or raise run\.timeout_s if one was only slow",
        str(caught.value),
    )
    assert not torch.distributed.is_initialized()


# --- training ---------------------------------------------------------------------------------------------------------


def test_two_ranks_train_one_model(config_file: Path, tmp_path: Path, interpreter: Interpreter) -> None:
    done = forked(interpreter, "tests.ranks", config_file, tmp_path, "cpu", 6)
    assert (done.code, done.left) == (0, []), done.err
    assert "Warning" not in done.err
    first, second = reports(tmp_path)
    assert first["weights"] == second["weights"]
    assert first["step"] == second["step"] == 6
    assert first["finite"] and second["finite"]

    # An epoch's samples come exactly once as valid, on one of the ranks. The second epoch is interrupted after 2 steps.
    for name, epoch in ("train", "0"), ("val", "0"):
        assert sorted(first[name][epoch] + second[name][epoch]) == list(range(PHOTOS))
    began = first["train"]["1"] + second["train"]["1"]
    assert len(began) == len(set(began)) == 2 * 2 * BATCH

    # Both report the same, of both.
    assert [result[:2] for result in first["results"]] == [["train", 0], ["val", 0], ["train", 1]]
    assert [result[:4] for result in first["results"]] == [result[:4] for result in second["results"]]

    # Two ranks with batches of 4 learn what one process does with batches of 8.
    settings = "pipelines.train.batch.size=8", f"train.out={tmp_path}/whole"
    whole = Trainer(read(config_file, *settings), device="cpu")
    without_dropout(whole.model)
    notes = Notes(whole)
    before = sample_of(whole.model)
    whole.run(notes, max_steps=3)
    assert first["early"] == second["early"]
    assert notes.early == pytest.approx(first["early"], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(before, notes.early, strict=True)) > 1e-3

    # One process goes on from their checkpoint, with just the samples that are left and the sums of both ranks.
    loss_sum, _, images = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["epoch_sums"]
    assert (loss_sum / images, images) == (first["results"][2][2], 2 * 2 * BATCH)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".lock",
        "best.pt",
        "classes.csv",
        "last.pt",
        "metrics.csv",
    ]
    alone, steps = Trainer(read(config_file), device="cpu", resume=True), Steps()
    assert alone.step == 7 + 4
    assert sample_of(alone.model) != before
    train = Seen(alone.train_loader)
    alone.train_loader = train  # type: ignore[assignment]
    alone.run(steps)
    assert steps.passes == [("train", 1, 3), ("val", 1, 7)]
    assert (steps.results[0].steps, steps.results[0].steps_in_pass) == (range(7), 7)
    assert sorted(began + train.samples[1]) == list(range(PHOTOS))


@pytest.mark.slow
def test_the_command_goes_on_from_one_process_on_two(config_file: Path, tmp_path: Path) -> None:
    """Shufflenet has batch statistics, which differ between the ranks: those of rank 0 are validated and saved."""
    model = "train.model=shufflenet_v2_x0_5"
    Trainer(read(config_file, model), device="cpu").run(TrainerEvents(), max_steps=2)
    command = ("gpuflow", "train", config_file, model, "--device", "cpu", "--resume", "--max-steps", 3)
    done = torchrun(*command)
    assert (done.code, done.left) == (0, []), done.err
    assert "Warning" not in done.err
    train, val, saved = done.out.splitlines()
    assert re.fullmatch(r"epoch 1  train  loss [\d.]+  accuracy [\d.]+  [\d,]+ images/s", train), "of the whole epoch"
    shown = re.fullmatch(r"epoch 1  val    loss ([\d.]+)  accuracy ([\d.]+)  [\d,]+ images/s", val)
    assert shown is not None
    assert saved.startswith(f"saved {tmp_path}/run/last.pt at step 4, preprocessing ")
    loss, accuracy = evaluated(read(config_file, model), tmp_path / "run" / "last.pt")
    assert float(shown[1]) == pytest.approx(loss, rel=1e-4, abs=1e-3)
    assert float(shown[2]) == pytest.approx(accuracy, abs=1e-3)


def evaluated(config: Config, checkpoint: Path) -> tuple[float, float]:
    """Mean loss and accuracy of a checkpoint over all photographs, each counted once."""
    state = torch.load(checkpoint, weights_only=True)
    model = _model(config, len(state["classes"]))
    model.load_state_dict(state["model"])
    model.eval()
    with torch.no_grad(), gpuflow.load(config.path, "val") as loader:
        logits, labels = (torch.cat(parts) for parts in zip(*((model(x), y) for x, y in loader), strict=True))
    assert len(labels) == PHOTOS
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(dim=1) == labels).double().mean())


# --- what a checkpoint of other ranks leaves --------------------------------------------------------------------------


def test_a_rest_that_fills_no_step_is_left_out(config_file: Path, tmp_path: Path) -> None:
    """27 samples, of which one rank took 24: with drop_last nothing is left for two."""
    trainer = Trainer(read(config_file), device="cpu")
    trainer.run(TrainerEvents(), max_steps=6)
    ranks = Ranks(rank=1, world_size=2)
    tail = Trainer(read(config_file), device="cpu", resume=True, ranks=ranks)
    assert (tail.step, tail.train_loader.state_dict()["position"]) == (3, 24)
    none = Trainer(read(config_file, "pipelines.train.batch.drop_last=true"), device="cpu", resume=True, ranks=ranks)
    assert none.step == 3 == len(none.train_loader)
    state = none.train_loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    broken = make_photos(tmp_path / "photos", classes=3, each=PHOTOS // 3)[5]
    truncate(broken)
    config = written(tmp_path, tmp_path / "photos")
    done = torchrun("gpuflow", "train", config, "--device", "cpu", "pipelines.train.on_error=raise")
    assert (done.code, done.left) == (1, []), done.err
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert re.match(rf"error: rank \d: {broken} \(sample 5\): decode: ", errors[0]), done.err
    assert all("is cut off from the others: " in line for line in errors[1:])
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {".lock", "last.pt"}, "a file is half-written"


@pytest.mark.slow
def test_ctrl_c_ends_all(config_file: Path) -> None:
    command = ("gpuflow", "train", config_file, "--device", "cpu", "train.epochs=100000")
    done = torchrun(*command, interrupt_at="epoch 1  val")
    assert (done.code, done.left) == (1, []), done.err
    assert done.seconds < 60
    assert "Unable to shutdown" not in done.err
