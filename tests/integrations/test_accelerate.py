"""A loop with Accelerate: killed and resumed from `save_state`; accumulated gradients, metrics of two processes."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.integrations.killing import make_data, run, steps, weights_equal

pytest.importorskip("accelerate", reason="accelerate is not installed")


SCRIPT = Path(__file__).with_name("accelerate_script.py")
EPOCHS = 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    make_data(folder)
    run(SCRIPT, folder, folder / "all", str(EPOCHS), "1")
    return folder


def test_accumulated_gradients_are_synchronised_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "all", str(EPOCHS), "3")
    synced = [step["synced"] for step in steps(tmp_path / "all.0.jsonl")]
    assert synced == 2 * [False, False, True, False, False, True, False, True]


def test_metrics_are_gathered_once_for_each_sample(whole: Path) -> None:
    assert json.loads((whole / "all.val.json").read_text()) == list(range(30))


@pytest.mark.parametrize("kill_at", [5, 8, 11])
def test_a_killed_run_goes_on_with_the_next_step(kill_at: int, whole: Path, tmp_path: Path) -> None:
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "killed", str(EPOCHS), "1", kill_at=kill_at)
    run(SCRIPT, tmp_path, tmp_path / "resumed", str(EPOCHS), "1", "resume")
    kept = kill_at // 2 * 2
    taken = steps(tmp_path / "killed.0.jsonl")[:kept] + steps(tmp_path / "resumed.0.jsonl")
    assert taken == steps(whole / "all.0.jsonl")
    assert weights_equal(whole / "all.pt", tmp_path / "resumed.pt")


def test_a_signal_saves_exits_75_and_the_run_goes_on(whole: Path, tmp_path: Path) -> None:
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "first", str(EPOCHS), "1", kill_at=5, by=signal.SIGUSR1)
    run(SCRIPT, tmp_path, tmp_path / "resumed", str(EPOCHS), "1", "resume")
    first = steps(tmp_path / "first.0.jsonl")
    assert len(first) == 5
    assert first + steps(tmp_path / "resumed.0.jsonl") == steps(whole / "all.0.jsonl")
    assert weights_equal(whole / "all.pt", tmp_path / "resumed.pt")


def test_two_processes_take_their_shares_and_are_resumed_by_one(whole: Path, tmp_path: Path) -> None:
    make_data(tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    run(launch, tmp_path, tmp_path / "two", "1", "1")
    ranks = [steps(tmp_path / f"two.{rank}.jsonl") for rank in (0, 1)]
    sequence = [i for pair in zip(*ranks, strict=True) for step in pair for i in step["indices"]]
    expected = [i for step in steps(whole / "all.0.jsonl") if step["epoch"] == 0 for i in step["indices"]]
    assert sequence[:30] == expected and Counter(expected) == Counter(range(30))
    assert json.loads((tmp_path / "two.val.json").read_text()) == list(range(30))
    run(SCRIPT, tmp_path, tmp_path / "one", str(EPOCHS), "1", "resume")
    rest = [i for step in steps(tmp_path / "one.0.jsonl") for i in step["indices"]]
    assert rest == [i for step in steps(whole / "all.0.jsonl") if step["epoch"] == 1 for i in step["indices"]]
