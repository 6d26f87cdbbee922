"""Which GPU a rank works on, as if torch saw two of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpuflow.errors import LoaderError
from gpuflow.runtime.ranks import Ranks


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_the_gpu_of_the_local_rank() -> None:
    second = Ranks(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert second.device("cuda") == torch.device("cuda", 1)
    assert second.device("cuda:0") == torch.device("cuda", 0), "what is said is what is taken"
    assert second.device("cpu") == second.device(None) == torch.device("cpu")
    assert Ranks().device("cuda") == torch.device("cuda"), "without ranks torch's current one"
    indices: Any = (0, 1)
    assert [Ranks().device(index) for index in indices] == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.usefixtures("two_gpus")
def test_too_few_gpus() -> None:
    third = Ranks(rank=2, world_size=3, local_rank=2, local_world_size=3)
    with pytest.raises(LoaderError, match="a GPU for each of this host's 3 ranks, and torch sees 2"):
        third.device("cuda")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ranks in (Ranks(), Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)):
        with pytest.raises(LoaderError, match="device 'cuda' needs CUDA, and torch sees no GPU here"):
            ranks.device("cuda")
