"""Packs arrays into one table, or into one block of memory that takes one allocation and one transfer to a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from gpuflow.arrays import Array, Bytes, Ints

_ALIGN = 16


def table_of(count: int, parts: Sequence[Array | int]) -> Ints:
    """Return the columns of all parts next to each other, int64 [count, columns].

    parts: each [count], [count, columns of it], or a number for a column of it.

    Examples:
        >>> table_of(2, [np.array([1, 2]), 9]).tolist()
        [[1, 9], [2, 9]]
    """
    columns = [np.full(count, part) if isinstance(part, int) else part for part in parts]
    columns = [column[:, None] if column.ndim == 1 else column for column in columns]
    table = np.empty((count, sum(column.shape[1] for column in columns)), np.int64)
    return np.concatenate(columns, axis=1, out=table)


def layout(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Return where each array begins in the block, and the size of the block, in bytes."""
    *starts, size = accumulate((-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays), initial=0)
    return starts, size


def write(block: Bytes, starts: Sequence[int], arrays: Sequence[Array]) -> None:
    """Copy the arrays into the block, each to its start."""
    for start, array in zip(starts, arrays, strict=True):
        block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array


def in_one_block(arrays: Sequence[Array]) -> tuple[list[int], Bytes]:
    """Return where each array begins in a block that has them all, and the block, uint8 [size].

    The block of one contiguous array of a fitting size is the array itself.

    Examples:
        >>> starts, block = in_one_block([np.zeros(3, np.uint8), np.zeros(2, np.int64)])
        >>> starts, block.nbytes
        ([0, 16], 32)
    """
    starts, size = layout(arrays)
    if len(arrays) == 1 and arrays[0].nbytes == size and arrays[0].flags.c_contiguous:
        return starts, arrays[0].reshape(-1).view(np.uint8)
    block = np.empty(size, np.uint8)
    write(block, starts, arrays)
    return starts, block


def tensors_in(block: torch.Tensor, starts: Sequence[int], arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return views of a block, uint8 [size] on any device: for each array one with its dtype and its shape.

    It makes few calls of torch, because each one releases Python's interpreter and waits for it again.
    """
    typed: dict[np.dtype[Any], torch.Tensor] = {}
    tensors = []
    for start, array in zip(starts, arrays, strict=True):
        if array.dtype not in typed:
            typed[array.dtype] = block.view(_torch_dtype(array.dtype))
        first = start // array.itemsize
        values = typed[array.dtype][first : first + array.size]
        tensors.append(values if array.ndim == 1 else values.view(array.shape))
    return tensors


def send_all(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Queue a copy of small arrays to a device on its current stream: a tensor of dtype and shape for each of them."""
    # torch keeps pinned memory until copies from it have ended.
    pinned = device.type == "cuda"
    if len(arrays) == 1:
        (array,) = arrays
        host = torch.empty(array.shape, dtype=_torch_dtype(array.dtype), device="cpu", pin_memory=pinned)
        host.numpy()[...] = array
        return [host.to(device, non_blocking=True)]
    starts, size = layout(arrays)
    block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    write(block.numpy(), starts, arrays)
    return tensors_in(block.to(device, non_blocking=True), starts, arrays)


@lru_cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
