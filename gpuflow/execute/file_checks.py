"""Which files of a chunk are complete. Each file of a source is checked once in a run, on the GPU."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.errors import LoaderTimeout
from gpuflow.execute.device_stream import DeviceStream
from gpuflow.execute.kernels.complete import FIELDS, LARGE_BYTES, MAX_BYTES, SPARE_BYTES, Workspace, complete_files
from gpuflow.execute.known_files import KnownFiles
from gpuflow.sources import Payload

__all__ = ["FileChecks"]

_PART_BYTES, _PART_FILES = 1 << 24, 256
"""The files of a chunk are checked in parts of at most this size, or one larger file."""
_ALIGN = 8
_TURN_SECONDS = 60.0


class _Memory(NamedTuple):
    """Device memory for a part: files uint8 [bytes], and what the kernels need."""

    files: torch.Tensor
    workspace: Workspace


class FileChecks:
    """The checks of one loader's or service's files. Any thread may call any method.

    Parts take turns in one piece of device memory, which is allocated for the first one.

    device_stream: of the GPU that checks, which does so on a stream of its own.
    """

    def __init__(self, device_stream: DeviceStream) -> None:
        self._device_stream = device_stream.another()
        self._complete, self._damaged = KnownFiles(), KnownFiles()
        self._memory: queue.SimpleQueue[_Memory | None] = queue.SimpleQueue()
        self._memory.put(None)

    def complete(
        self, rows: NDArray[np.int64], payload: Payload, headers: Headers, indices: Sequence[int] | None
    ) -> NDArray[np.bool_]:
        """Which of these rows [n] of a payload are complete files. Waits for the GPU.

        headers: of all files of the payload; those of the rows are files that the engines decode.
        indices: of the payload's samples in the source. Without them every file is new, as those that a service gets.
        """
        if indices is None:
            return self._check(rows, payload, headers)
        samples, lengths = (np.asarray(x, np.int64)[rows] for x in (indices, payload.sizes))
        complete = self._complete.known(samples, lengths)
        new = ~(complete | self._damaged.known(samples, lengths))
        complete[new] = self._check(rows[new], payload, headers)
        for files, found in ((self._complete, complete), (self._damaged, ~complete)):
            files.add(samples[new & found], lengths[new & found])
        return complete

    def _check(self, rows: NDArray[np.int64], payload: Payload, headers: Headers) -> NDArray[np.bool_]:
        complete = np.zeros(len(rows), bool)
        starts, sizes = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
        restarts = _restarts_of(headers, rows)
        order = np.flatnonzero((sizes <= MAX_BYTES) & (2 * restarts < sizes))
        order = order[np.argsort(starts[order], kind="stable")]
        for which in _parts(starts[order], sizes[order]):
            part = order[which]
            part = part[np.argsort(-sizes[part], kind="stable")]  # the largest first
            complete[part] = self._check_part(rows[part], payload, headers, restarts[part])
        return complete

    def _check_part(
        self, rows: NDArray[np.int64], payload: Payload, headers: Headers, restarts: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Check files that lie close together. They are copied to the GPU with what lies between them."""
        offsets, sizes = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
        start, stop = int(offsets.min()), int((offsets + sizes).max())
        with self._memory_for(stop - start) as memory:
            files = memory.files[: stop - start]
            self._device_stream.copy_into(files, torch.from_numpy(payload.buffer[start:stop]))
            described = _describe(files.data_ptr() + offsets - start, sizes, headers, rows, restarts)
            (sent,) = self._device_stream.send_all([described])
            large, places = int((sizes > LARGE_BYTES).sum()), int((restarts + 2).sum())
            with self._device_stream.queued():
                found = complete_files(sent, large, places, memory.workspace)
            return self._device_stream.receive(found).numpy().astype(bool)

    @contextmanager
    def _memory_for(self, size: int) -> Iterator[_Memory]:
        """Memory for a part of this size, once the part before is done. Raises LoaderTimeout if that takes too long."""
        try:
            memory = self._memory.get(timeout=_TURN_SECONDS)
        except queue.Empty:
            raise LoaderTimeout(
                f"the GPU did not check files within {_TURN_SECONDS:g} s; `nvidia-smi` shows what else runs there"
            ) from None
        try:
            if memory is None:
                memory = self._allocated(_PART_BYTES)
            yield memory if size <= _PART_BYTES else self._allocated(size)
        finally:
            self._memory.put(memory)

    def _allocated(self, size: int) -> _Memory:
        device = self._device_stream.device
        with self._device_stream.queued():
            files = torch.empty(size, dtype=torch.uint8, device=device)
            count = _PART_FILES if size <= _PART_BYTES else 1
            return _Memory(files, Workspace.of(count, size + count * (SPARE_BYTES + _ALIGN), device))


def _parts(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Group files that begin at these ascending places and have these sizes."""
    first = 0
    for i, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if i > first and (start + size - starts[first] > _PART_BYTES or i - first == _PART_FILES):
            yield slice(first, i)
            first = i
    if len(sizes):
        yield slice(first, len(sizes))


def _units_of(headers: Headers, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each file the number of coded units (MCUs), and of blocks of the first component in one."""
    sampling = headers.sampling[rows].astype(np.int64)
    across, down = np.maximum(sampling >> 4, 1), np.maximum(sampling & 15, 1)
    return (-(-headers.sizes[rows] // (8 * np.column_stack([down, across])))).prod(axis=1), across * down


def _restarts_of(headers: Headers, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of restart markers that each file should have."""
    units, intervals = _units_of(headers, rows)[0], headers.intervals[rows]
    return np.where(intervals > 0, -(-units // np.maximum(intervals, 1)) - 1, 0)


def _describe(
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    headers: Headers,
    rows: NDArray[np.int64],
    restarts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The files at these addresses as `complete_files` takes them, [n, len(FIELDS)]."""
    units, luma = _units_of(headers, rows)
    spaces = -(-(lengths - headers.scans[rows] + SPARE_BYTES) // _ALIGN) * _ALIGN
    columns = {
        "file": addresses,
        "length": lengths,
        "scan": headers.scans[rows],
        "components": np.where(headers.sampling[rows] > 0, 3, 1),
        "luma": luma,
        "units": units,
        "interval": headers.intervals[rows],
        "restarts": restarts,
        "data": np.cumsum(spaces) - spaces,
        "places": np.cumsum(restarts + 2) - restarts - 2,
    }
    return np.column_stack([columns[name] for name in FIELDS]).astype(np.int64)
