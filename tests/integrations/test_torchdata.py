"""A loader as what torchdata calls stateful: the protocol of its StatefulDataLoader, and its nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import gpuflow
from tests.integrations.killing import make_data, run, steps

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

SCRIPT = Path(__file__).with_name("torchdata_script.py")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("photos"))


def indices(batch: Any) -> list[int]:
    [found] = [batch.indices] if isinstance(batch, gpuflow.Batch) else batch
    return list(map(int, found))


@pytest.mark.parametrize("taken", range(8))
def test_a_state_within_an_epoch_means_what_it_means_to_a_stateful_dataloader(taken: int, file: Path) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: stateful.StatefulDataLoader(TensorDataset(torch.arange(30)), batch_size=4),
        lambda: gpuflow.load(file, "val"),
    ]
    for make in makers:
        one, other = make(), make()
        batches = iter(one)
        seen = [indices(next(batches)) for _ in range(taken)]
        other.load_state_dict(one.state_dict())
        seen += map(indices, other)
        assert [i for batch in seen for i in batch] == list(range(30)), one
        assert [i for batch in other for i in indices(batch)] == list(range(30)), "the next epoch is whole"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    make_data(folder)
    run(SCRIPT, folder, folder / "all.jsonl", "2")
    return folder / "all.jsonl"


@pytest.mark.parametrize("kill_at", [3, 8, 9, 14])
def test_a_killed_run_goes_on_with_the_next_batch(kill_at: int, whole: Path, tmp_path: Path) -> None:
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "killed.jsonl", "2", kill_at=kill_at)
    run(SCRIPT, tmp_path, tmp_path / "resumed.jsonl", "2", "resume")
    assert steps(tmp_path / "killed.jsonl")[: kill_at // 2 * 2] + steps(tmp_path / "resumed.jsonl") == steps(whole)
