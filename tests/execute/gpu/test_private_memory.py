"""Tests `PrivateMemory` on a CPU, with a fake `torch.cuda.MemPool`. test_batches_gpu.py has a test on a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpuflow.execute.gpu.decode_buffers import PrivateMemory
from tests.host_stream import HostStream

GPU = torch.device("cuda", 1)


def stream_on(device: torch.device) -> Any:
    """A fake stream of a device that this machine need not have."""
    stream: Any = HostStream()
    stream.device = device
    return stream


class Pool:
    """Replaces `torch.cuda.MemPool`. in_use: the devices for which it is the current pool."""

    def __init__(self) -> None:
        self.in_use: list[torch.device] = []

    @contextlib.contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        self.in_use.append(device)
        yield
        self.in_use.remove(device)


@pytest.fixture(name="pools")
def _pools(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Pool]]:
    """The pools that were made."""
    made: list[weakref.ref[Pool]] = []

    def make() -> Pool:
        pool = Pool()
        made.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr(torch.cuda, "MemPool", make)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", Pool.use)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return made


@pytest.mark.parametrize("freed", [True, False], ids=["freed", "dropped"])
def test_tensors_are_allocated_in_the_pool_and_deleted_before_it(pools: list[weakref.ref[Pool]], freed: bool) -> None:
    pool_left: list[bool] = []

    def allocate() -> torch.Tensor:
        (pool,) = (made() for made in pools)
        assert pool is not None and pool.in_use == [GPU]
        memory = torch.empty(3)
        weakref.finalize(memory, lambda: pool_left.append(pools[0]() is not None))
        return memory

    memory = PrivateMemory(stream_on(GPU), allocate)
    pool = pools[0]()
    assert len(memory.tensor) == 3 and pool is not None and pool.in_use == []
    del pool
    if freed:
        memory.free()
    else:
        del memory
    assert pool_left == [True] and pools[0]() is None


def test_a_failed_allocation_leaves_no_pool(pools: list[weakref.ref[Pool]]) -> None:
    def allocate() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        PrivateMemory(stream_on(GPU), allocate)
    gc.collect()  # the error's traceback
    assert len(pools) == 1 and pools[0]() is None


@pytest.mark.parametrize(("device", "backend"), [(GPU, "cudaMallocAsync"), (GPU, "pluggable"), ("cpu", "native")])
def test_without_pools_it_is_memory_like_any_other(
    pools: list[weakref.ref[Pool]], monkeypatch: pytest.MonkeyPatch, device: torch.device | str, backend: str
) -> None:
    """torch raises RuntimeError where a pool is made with another allocator than its own."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    memory = PrivateMemory(stream_on(torch.device(device)), lambda: torch.empty(3))
    assert len(memory.tensor) == 3
    memory.free()
    assert not pools
