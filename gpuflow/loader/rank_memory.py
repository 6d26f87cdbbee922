"""Memory that the ranks of one host share, found through the store of their process group.

The first rank of a host that calls `shared_by_ranks` creates an anonymous file in memory (memfd). The other ranks open
it through that process's descriptors in /proc. The kernel frees it with the last process that uses it, even if all of
them are killed, and no file name can be left behind. No rank waits for another one: a rank that cannot open the file,
for example from another container, shares no memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpuflow.runtime.memory import memory_file

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["shared_by_ranks"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Holds the kernel's boot ID, a text that differs between hosts."""
_NAME = "gpuflow-ranks-"


def shared_by_ranks(store: Store, key: str, size: int) -> NDArray[np.uint8] | None:
    """Memory [size], zeros at first, that all ranks of this host get that ask with this key; None if it cannot be had.

    Raises RuntimeError if the store does not answer, or has no `compare_set`.
    """
    with suppress(OSError), ExitStack() as opened:
        token = secrets.token_hex(8)
        descriptor = memory_file(f"{_NAME}{token}")
        opened.callback(os.close, descriptor)
        os.ftruncate(descriptor, size)
        own = f"{os.getpid()} {descriptor} {token}"
        found = store.compare_set(f"{key}/{_BOOT.read_text().strip()}", "", own).decode()
        if found != own:
            return _opened(found, size)
        memory = _mapped(descriptor, size)
        # Other ranks can open the file only while this descriptor is open.
        weakref.finalize(memory, opened.pop_all().close).atexit = False
        return memory
    return None


def _opened(found: str, size: int) -> NDArray[np.uint8] | None:
    """The memory that another rank made. found: its process, the descriptor there, and the file's name."""
    process, number, token = found.split()
    with suppress(OSError), ExitStack() as opened:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        # In another container this may be another process's file.
        if name.startswith(f"/memfd:{_NAME}{token}") and os.fstat(descriptor).st_size == size:
            return _mapped(descriptor, size)
    return None


def _mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
