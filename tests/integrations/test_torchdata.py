"""A loader as what torchdata calls stateful: the protocol of its StatefulDataLoader, and its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import TensorDataset

import gpuflow
from tests.integrations.killing import make_data, run, steps

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

SCRIPT = Path(__file__).with_name("torchdata_script.py")


def test_a_loader_is_stateful_at_every_batch_as_a_stateful_dataloader_is(tmp_path: Path) -> None:
    import torch
    from torchdata.stateful_dataloader.stateful import Stateful

    file = make_data(tmp_path)
    theirs = stateful.StatefulDataLoader(TensorDataset(torch.arange(30)), batch_size=4)
    with gpuflow.load(file, "val") as ours:
        assert isinstance(ours, Stateful)
        whole = [indices.tolist() for (indices,) in theirs]
        for taken in range(9):
            for one, fresh in ((theirs, stateful.StatefulDataLoader(TensorDataset(torch.arange(30)), batch_size=4)), (ours, gpuflow.load(file, "val"))):
                batches, seen = iter(one), []
                for _ in range(min(taken, 8)):
                    seen.append(_indices(next(batches)))
                state = one.state_dict()
                fresh.load_state_dict(state)
                rest = [_indices(batch) for batch in fresh]
                if taken < 8:
                    assert seen + rest == whole, (one, taken)
                if fresh is not theirs and isinstance(fresh, gpuflow.Loader):
                    fresh.close()
                del batches
            ours.load_state_dict({**ours.state_dict(), "position": 0})


def _indices(batch: object) -> list[int]:
    if isinstance(batch, gpuflow.Batch):
        return batch.indices.tolist()
    [indices] = batch  # type: ignore[misc, attr-defined]
    return list(indices.tolist())


@pytest.mark.parametrize("kill_at", [3, 8, 9, 14])
def test_a_killed_run_goes_on_with_the_next_batch(kill_at: int, tmp_path: Path) -> None:
    make_data(tmp_path)
    run(SCRIPT, tmp_path, tmp_path / "all.jsonl", "2")
    run(SCRIPT, tmp_path, tmp_path / "killed.jsonl", "2", kill_at=kill_at)
    run(SCRIPT, tmp_path, tmp_path / "resumed.jsonl", "2", "resume")
    taken = steps(tmp_path / "killed.jsonl")[: kill_at // 2 * 2] + steps(tmp_path / "resumed.jsonl")
    assert taken == steps(tmp_path / "all.jsonl")
