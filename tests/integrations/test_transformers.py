"""The example for Hugging Face's Trainer: killed at any step, also within an update, or by a signal, and resumed."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.datasets import make_photos
from tests.integrations.killing import ROOT, run, steps, weights_equal

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

SCRIPT = Path(__file__).with_name("transformers_script.py")
WHOLE: dict[tuple[str, ...], Path] = {}
"""By options: the folder of an uninterrupted run."""


def make_folder(folder: Path) -> Path:
    """40 photographs and the file of docs/trainers.md: epochs of five steps."""
    make_photos(folder / "data" / "photos", classes=10, each=4)
    [file] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/trainers.md").read_text(), flags=re.DOTALL)
    (folder / "photos.yaml").write_text(file)
    return folder


def whole(options: tuple[str, ...], factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if options not in WHOLE:
        WHOLE[options] = make_folder(factory.mktemp("whole"))
        run(SCRIPT, WHOLE[options], WHOLE[options] / "all.jsonl", *options)
    return steps(WHOLE[options] / "all.jsonl")


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
    run(SCRIPT, tmp_path, tmp_path / "killed.jsonl", *options, kill_at=kill_at)
    run(SCRIPT, tmp_path, tmp_path / "resumed.jsonl", *options)
    assert len(expected) == 11 and len({step.get("pixels") for step in expected}) == 11
    assert steps(tmp_path / "killed.jsonl")[:kept] + steps(tmp_path / "resumed.jsonl") == expected
    assert weights_equal(WHOLE[options] / "all.pt", tmp_path / "resumed.pt")


def test_a_signal_saves_after_the_next_step_exits_75_and_the_run_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Other sizes of steps are refused, because Trainer counts steps. A checkpoint that is not whole is left aside."""
    expected = whole(("5", "1"), tmp_path_factory)
    make_folder(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "first.jsonl", "5", "1", kill_at=2, by=signal.SIGUSR1)
    *first, _ = steps(tmp_path / "first.jsonl")
    assert len(first) == 3
    shutil.copytree(tmp_path / "runs" / "trainer" / "checkpoint-3", tmp_path / "runs" / "trainer" / "checkpoint-4")
    (tmp_path / "runs" / "trainer" / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.raises(AssertionError, match="Trainer counts steps: resume with the batch size"):
        run(SCRIPT, tmp_path, tmp_path / "other.jsonl", "5", "2")
    run(SCRIPT, tmp_path, tmp_path / "resumed.jsonl", "5", "1")
    assert first + steps(tmp_path / "resumed.jsonl") == expected
    assert weights_equal(WHOLE["5", "1"] / "all.pt", tmp_path / "resumed.pt")
