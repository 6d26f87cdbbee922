"""Memory for buffers: ordinary, pinned for a GPU, or shared with worker processes."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SharedBlock",
    "heap",
    "memory_file",
    "pinned",
    "shared",
    "shared_and_pinned",
    "shared_block",
    "shared_keys",
]


def heap(size: int) -> NDArray[np.uint8]:
    """So many bytes of ordinary memory."""
    return np.empty(size, np.uint8)


def pinned(size: int) -> NDArray[np.uint8]:
    """So many bytes of memory that a GPU copies from directly."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Memory that other processes can map by its descriptor. key: never used again in this process. size: in bytes."""

    key: int
    descriptor: int
    size: int


_shared: dict[int, SharedBlock] = {}
"""By the address of the first byte."""

_keys = itertools.count()


def memory_file(name: str) -> int:
    """The descriptor of a new file in memory. Raises OSError where there is none, such as in a sandbox."""
    try:
        return os.memfd_create(name)
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this Python has no os.memfd_create") from error


def shared(size: int) -> NDArray[np.uint8]:
    """So many bytes that other processes can map, see `shared_block`. Where that cannot be had, it is `heap`."""
    try:
        return _share(size)[0]
    except OSError:
        return heap(size)


def shared_and_pinned(size: int) -> NDArray[np.uint8]:
    """The same, that the current GPU copies from directly. Where that cannot be had, it is `pinned` alone."""
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        memory, address = _share(size)
    except OSError:
        return pinned(size)
    if int(runtime.cudaHostRegister(address, size, 0)):
        return pinned(size)
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def shared_block(memory: NDArray[Any]) -> SharedBlock | None:
    """By what other processes can map this array, or None where it does not begin where one of `shared` does."""
    return _shared.get(memory.ctypes.data)


def shared_keys() -> set[int]:
    """Of all that there is now."""
    return {block.key for block in list(_shared.values())}


def _share(size: int) -> tuple[NDArray[np.uint8], int]:
    """(the memory, where it is). Raises OSError."""
    descriptor = memory_file("gpuflow")
    try:
        os.ftruncate(descriptor, size)
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    address, block = memory.ctypes.data, SharedBlock(next(_keys), descriptor, size)
    _shared[address] = block
    weakref.finalize(memory, _unshare, address, block).atexit = False  # views of it keep it
    return memory, address


def _unshare(address: int, block: SharedBlock) -> None:
    if _shared.get(address) is block:
        del _shared[address]
    os.close(block.descriptor)
