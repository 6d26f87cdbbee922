"""Shared memory: separate buffers, given back to the system, and no file descriptor for each."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.runtime.memory import SharedBlock, heap, shared, shared_and_pinned, shared_block, shared_keys
from tests.datasets import deadline, python

SIZE = 300_000


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


def block_of(memory: NDArray[np.uint8]) -> SharedBlock:
    block = shared_block(memory)
    assert block is not None
    return block


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_buffers_are_as_long_as_asked_for_and_apart() -> None:
    buffers = [shared(size) for size in (1, 5000, mmap.PAGESIZE, SIZE)]
    for mark, buffer in enumerate(buffers):
        buffer[:] = mark
    assert [len(buffer) for buffer in buffers] == [1, 5000, mmap.PAGESIZE, SIZE]
    for mark, buffer in enumerate(buffers):
        assert (buffer == mark).all()
        assert buffer.ctypes.data % mmap.PAGESIZE == 0
        assert block_of(buffer).length >= len(buffer)


def test_another_mapping_of_a_block_shows_the_same_bytes() -> None:
    shared(SIZE)
    buffer = shared(SIZE)
    buffer[:] = 7
    block = block_of(buffer)
    with mmap.mmap(block.descriptor, block.size) as again:
        assert again[block.start : block.start + SIZE] == bytes([7]) * SIZE
        again[block.start] = 9
    assert buffer[0] == 9


def test_buffers_take_no_descriptors_of_their_own() -> None:
    first = shared(SIZE)
    before = descriptors()
    buffers = [shared(SIZE) for _ in range(300)]
    assert descriptors() == before
    assert len({block_of(buffer).key for buffer in (first, *buffers)}) == 1


def test_a_buffer_is_as_long_as_its_views_and_its_pages_are_given_back() -> None:
    other = shared(SIZE)
    buffer = shared(SIZE)
    buffer[:] = 1
    descriptor, address = block_of(buffer).descriptor, buffer.ctypes.data
    with_both = os.fstat(descriptor).st_blocks * 512
    view = buffer[10:]
    del buffer
    gc.collect()
    assert os.fstat(descriptor).st_blocks * 512 == with_both
    assert view[0] == 1
    del view
    gc.collect()
    assert os.fstat(descriptor).st_blocks * 512 <= with_both - SIZE
    again = shared(SIZE)
    assert again.ctypes.data == address, "its place is used again"
    assert not again.any()
    assert block_of(other).descriptor == descriptor


def test_neighbours_that_are_free_become_one_place() -> None:
    buffers = [shared(SIZE) for _ in range(3)]
    last = shared(SIZE)
    start = min(block_of(buffer).start for buffer in buffers)
    for i in (0, 0, 0):
        del buffers[i]
        gc.collect()
    assert block_of(shared(2 * SIZE)).start == start
    del last


def test_without_buffers_there_is_nothing() -> None:
    gc.collect()
    before, keys = descriptors(), shared_keys()
    buffers = [shared(SIZE) for _ in range(3)]
    key = block_of(buffers[0]).key
    del buffers
    gc.collect()
    assert descriptors() <= before
    assert key not in shared_keys() or key in keys


def test_threads_and_the_garbage_collector_never_share_a_buffer() -> None:
    clashes: list[int] = []

    def work(mark: int) -> None:
        for i in range(150):
            buffer = shared(5000 + 3000 * (i % 7))
            buffer[:] = mark
            cycle: list[object] = [buffer]
            cycle.append(cycle)
            if i % 10 == 0:
                gc.collect()
            if not (buffer == mark).all():
                clashes.append(mark)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not clashes


def test_a_forked_child_takes_nothing_away() -> None:
    code = """
import os
from gpuflow.runtime.memory import shared, shared_block
buffers = [shared(100_000) for _ in range(3)]
for buffer in buffers:
    buffer[:] = 5
if (child := os.fork()) == 0:
    assert shared_block(buffers[0]) is None
    buffers.clear()
    del buffer
    own = [shared(100_000) for _ in range(3)]
    for buffer in own:
        buffer[:] = 6
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert all((buffer == 5).all() for buffer in buffers)
print("kept")
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr


@pytest.mark.parametrize(
    "limit", ["RLIMIT_AS, (8 << 30, -1)", "RLIMIT_AS, (used() + (100 << 20), -1)", "RLIMIT_FSIZE, (1 << 20, -1)"]
)
def test_fewer_addresses_do(limit: str) -> None:
    code = f"""
import resource
from gpuflow.runtime.memory import shared, shared_block
def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.{limit})
buffers = [shared(300_000) for _ in range(20)]
for buffer in buffers:
    buffer[:] = 1
print(all(shared_block(buffer) is not None for buffer in buffers))
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_where_nothing_can_be_shared_it_is_ordinary_memory() -> None:
    code = """
import os, resource
from gpuflow.runtime.memory import shared, shared_block
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
buffer = shared(1000)
buffer[:] = 1
print(len(buffer), shared_block(buffer))
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "1000 None\n"), done.stderr


class CudaRuntime:
    """Takes the place of CUDA's runtime and torch's kernels: a failed call's error stays until a kernel raises it."""

    def __init__(self, *, registers: bool) -> None:
        self.registers, self.error, self.registered = registers, 0, set[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.registers:
            self.registered.add(address)
        else:
            self.error = 2
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def launch(self, *arguments: Any, **options: Any) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error} of an earlier call")


@pytest.fixture
def make_runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], CudaRuntime]:
    def make(registers: bool) -> CudaRuntime:
        runtime = CudaRuntime(registers=registers)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch, "ones", runtime.launch)
        monkeypatch.setattr("gpuflow.runtime.memory.pinned", heap)
        return runtime

    return make


def test_memory_that_cannot_be_registered_leaves_no_error_behind(make_runtime: Callable[[bool], CudaRuntime]) -> None:
    """It would be raised after the next kernel that this thread launches."""
    runtime = make_runtime(False)
    buffer = shared_and_pinned(SIZE)
    assert len(buffer) == SIZE and shared_block(buffer) is None
    runtime.launch()


def test_registered_memory_is_unregistered_with_its_last_view(make_runtime: Callable[[bool], CudaRuntime]) -> None:
    runtime = make_runtime(True)
    buffer = shared_and_pinned(SIZE)
    assert runtime.registered == {buffer.ctypes.data} and shared_block(buffer) is not None
    view = buffer[5:]
    del buffer
    gc.collect()
    assert runtime.registered
    del view
    gc.collect()
    assert not runtime.registered
