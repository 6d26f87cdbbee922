"""The example for Hugging Face's Trainer: killed at any step, also within an update, or by a signal, and resumed.

On one rank and on two.
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import gpuflow
from tests.datasets import make_photos
from tests.integrations.killing import ROOT, hashes, run, steps, weights_equal

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

SCRIPT = Path(__file__).with_name("transformers_script.py")
WHOLE: dict[tuple[str, ...], Path] = {}
"""By options: the folder of an uninterrupted run."""


def make_folder(folder: Path, *, batch: int = 8) -> Path:
    """40 photographs and the file of docs/trainers.md, with this batch size: epochs of five steps."""
    make_photos(folder / "data" / "photos", classes=10, each=4)
    [file] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/trainers.md").read_text(), flags=re.DOTALL)
    (folder / "photos.yaml").write_text(file.replace("size: 8", f"size: {batch}"))
    return folder


def whole(options: tuple[str, ...], factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if options not in WHOLE:
        WHOLE[options] = make_folder(factory.mktemp("whole"))
        run(SCRIPT, WHOLE[options], WHOLE[options] / "all", *options)
    return steps(WHOLE[options] / "all.0.jsonl")


@pytest.mark.parametrize(
    ("kill_at", "options", "kept"),
    [
        (3, ("2", "1"), 2),
        (7, ("5", "1"), 5),  # the checkpoint is of the epoch's last step
        (8, ("1", "2"), 7),  # within an update; the fifth step of an epoch is an update alone
    ],
)
def test_a_killed_run_goes_on_with_the_next_sample(
    kill_at: int, options: tuple[str, ...], kept: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = whole(options, tmp_path_factory)
    make_folder(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "killed", *options, kill_at=kill_at)
    run(SCRIPT, tmp_path, tmp_path / "resumed", *options)
    assert len(expected) == 11 and len({pixels for step in expected for pixels in step.get("pixels", [])}) == 80
    assert steps(tmp_path / "killed.0.jsonl")[:kept] + steps(tmp_path / "resumed.0.jsonl") == expected
    assert weights_equal(WHOLE[options] / "all.0.pt", tmp_path / "resumed.0.pt")


def test_a_signal_saves_after_the_next_step_exits_75_and_the_run_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Other sizes of steps are refused, because Trainer counts steps. A checkpoint that is not whole is left aside."""
    expected = whole(("5", "1"), tmp_path_factory)
    make_folder(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "first", "5", "1", kill_at=2, by=signal.SIGUSR1)
    *first, _ = steps(tmp_path / "first.0.jsonl")
    assert len(first) == 3
    shutil.copytree(tmp_path / "runs" / "trainer" / "checkpoint-3", tmp_path / "runs" / "trainer" / "checkpoint-4")
    (tmp_path / "runs" / "trainer" / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.raises(AssertionError, match="Trainer counts steps: resume with the batch size"):
        run(SCRIPT, tmp_path, tmp_path / "other", "5", "2")
    run(SCRIPT, tmp_path, tmp_path / "resumed", "5", "1")
    assert first + steps(tmp_path / "resumed.0.jsonl") == expected
    assert weights_equal(WHOLE["5", "1"] / "all.0.pt", tmp_path / "resumed.0.pt")


# --- two ranks --------------------------------------------------------------------------------------------------------

ON_TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
OPTIONS = ("2", "1")


def of_both(log: Path) -> list[list[dict[str, Any]]]:
    """The steps of rank 0 and of rank 1."""
    return [steps(log.with_suffix(f".{rank}.jsonl")) for rank in range(2)]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on two ranks, with four photographs a step each."""
    folder = make_folder(tmp_path_factory.mktemp("two"), batch=4)
    run(ON_TWO, folder, folder / "all", *OPTIONS)
    return folder


def test_two_ranks_train_one_model_on_each_sample_once_an_epoch(on_two: Path) -> None:
    """On the pixels that one rank has in the step of this number, with twice the batch size."""
    first, second = of_both(on_two / "all")
    overrides = ["pipelines.train.batch.size=8", f"source.folder={on_two / 'data' / 'photos'}"]
    with gpuflow.load(on_two / "photos.yaml", "train", rank=0, world_size=1, overrides=overrides) as loader:
        for epoch in range(2):
            seen: list[int] = []
            for step, batch in enumerate(loader, start=5 * epoch):
                images, labels = batch
                assert first[step]["pixels"] + second[step]["pixels"] == hashes(images)
                assert first[step]["labels"] + second[step]["labels"] == labels.tolist()
                assert first[step]["step"] == second[step]["step"] == step
                seen += batch.indices.tolist()
            assert sorted(seen) == list(range(40))
    assert len(first) == len(second) == 11
    one, other = (torch.load(on_two / f"all.{rank}.pt", weights_only=True) for rank in range(2))
    learned = [name for name in one if "running" not in name]  # means of BatchNorm are those of the rank's samples
    assert learned and all(torch.equal(one[name], other[name]) for name in learned)


def test_after_a_rank_is_killed_both_go_on_with_the_next_sample(on_two: Path, tmp_path: Path) -> None:
    make_folder(tmp_path, batch=4)
    run(ON_TWO, tmp_path, tmp_path / "killed", *OPTIONS, kill_at=7)
    run(ON_TWO, tmp_path, tmp_path / "resumed", *OPTIONS)
    parts = zip(of_both(tmp_path / "killed"), of_both(tmp_path / "resumed"), strict=True)
    assert [killed[:6] + resumed for killed, resumed in parts] == of_both(on_two / "all")
    assert weights_equal(on_two / "all.0.pt", tmp_path / "resumed.0.pt")


def test_a_signal_to_one_of_two_ranks_saves_and_ends_both(on_two: Path, tmp_path: Path) -> None:
    make_folder(tmp_path, batch=4)
    run(ON_TWO, tmp_path, tmp_path / "first", "5", "1", kill_at=2, by=signal.SIGUSR1)
    run(ON_TWO, tmp_path, tmp_path / "resumed", "5", "1")
    parts = zip(of_both(tmp_path / "first"), of_both(tmp_path / "resumed"), strict=True)
    assert [first[:-1] + resumed for first, resumed in parts] == of_both(on_two / "all")
    assert weights_equal(on_two / "all.0.pt", tmp_path / "resumed.0.pt")
