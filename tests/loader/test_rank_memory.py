"""Which processes get the same memory, and when it goes."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from gpuflow.loader import agreement
from gpuflow.loader.agreement import shared_by_ranks
from tests.forking import Interpreter

ANOTHER_RANK = """
import sys, time
from torch.distributed import FileStore
from gpuflow.loader.agreement import shared_by_ranks
memory = shared_by_ranks(FileStore(sys.argv[1], 2), "key", int(sys.argv[2]))
found = memory[:4].tolist()
memory[3] = 9
print(found, flush=True)
time.sleep(int(sys.argv[3]))
"""


@pytest.fixture(params=["file", "hash", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    match request.param:
        case "file":
            yield FileStore(str(tmp_path / "store"), 2)
        case "hash":
            yield HashStore()
        case _:
            yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def open_files() -> set[str]:
    """The descriptors of this process's files that ranks can share."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was that of the listing
            if agreement._NAME in os.readlink(entry):
                found.add(entry.name)
    return found


def test_equal_keys_get_the_same_memory(store: Any) -> None:
    first, second, other = (shared_by_ranks(store, key, 100) for key in ("a", "a", "b"))
    assert first is not None and second is not None and other is not None
    assert first.shape == (100,) and not first.any()
    first[[3, 99]] = 7, 8
    assert second[[3, 99]].tolist() == [7, 8]
    assert not other.any()


def test_another_process_gets_it_too(tmp_path: Path, interpreter: Interpreter) -> None:
    own = shared_by_ranks(FileStore(str(tmp_path / "store"), 2), "key", 64)
    assert own is not None
    own[:4] = 1, 2, 3, 4
    done = interpreter.run(ANOTHER_RANK, str(tmp_path / "store"), "64", "0")
    assert done.stdout == "[1, 2, 3, 4]\n", done.stderr
    assert own[3] == 9


def test_memory_of_a_killed_rank_stays_with_the_others_and_new_ranks_go_without(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with interpreter.start(ANOTHER_RANK, str(tmp_path / "store"), "64", "600") as process:
        process.await_output("[0, 0, 0, 0]\n")
        own = shared_by_ranks(store, "key", 64)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert own is not None and own[3] == 9
    assert shared_by_ranks(store, "key", 64) is None


def test_it_goes_with_the_last_view(store: Any) -> None:
    gc.collect()  # memory of earlier tests
    before = open_files()
    memory = shared_by_ranks(store, "a", 100)
    assert memory is not None
    view = memory.view(np.uint32).reshape(5, 5)[2]
    del memory
    gc.collect()
    assert open_files() > before
    del view
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize("found", ["1 3 abc", "999999999 3 abc", "{pid} 0 abc", "{pid} {descriptor} another"])
def test_what_is_not_that_memory_is_not_opened(found: str) -> None:
    """A process of that number in another container, one that ended, and another file."""
    store = HashStore()
    memory = shared_by_ranks(store, "a", 100)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid, descriptor, _ = store.get(f"a/{boot}").decode().split()
    assert int(pid) == os.getpid() and descriptor in open_files()
    store.set(f"b/{boot}", found.format(pid=pid, descriptor=descriptor))
    assert shared_by_ranks(store, "b", 100) is None
    assert memory is not None and not memory.any()
    assert shared_by_ranks(store, "a", 101) is None, "a rank that has another number of samples"


def test_without_files_in_memory_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert shared_by_ranks(HashStore(), "a", 100) is None
