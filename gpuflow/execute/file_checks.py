"""Checks which files of a chunk are complete. Each file of a source is checked once in a run, by one rank of a host.

Where there are cores for it, C code on the CPU checks it, else the GPU does: its kernels take time from those of a
training.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.decode.complete import FIELDS, MAX_BYTES, can_be_read, complete_on_cpu, describe
from gpuflow.execute.device_stream import DeviceStream, send_array, take_free
from gpuflow.execute.kernels.complete import LARGE_BYTES, MARGIN_BYTES, Workspace, complete_files
from gpuflow.execute.known_files import MAX_REMEMBERED, KnownFiles
from gpuflow.execute.private_memory import PrivateMemory
from gpuflow.sources import Payload

__all__ = ["FileChecks"]

_PART_BYTES, _PART_FILES = 1 << 24, 256
"""The files of a chunk are checked in parts of at most this size, or one larger file."""
_ALIGN = 8
_FILE, _LENGTH, _SCAN, _RESTARTS, _DATA, _PLACES = map(
    FIELDS.index, ("file", "length", "scan", "restarts", "data", "places")
)
_MOST_CPU_BYTES = 1 << 20
"""The GPU checks a service's larger files, because many of its threads read one file. In a loader the CPU checks files
of any size, because its other threads check other files of the chunk at the same time."""
_TURN_SECONDS = 60.0
_UNUSED_CHUNKS = 256
"""The number of consecutive chunks without a new file after which the memory is freed."""


class _Memory(NamedTuple):
    """Device memory for a part: files uint8 [bytes], and the kernels' workspace."""

    files: torch.Tensor
    workspace: Workspace


class FileChecks:
    """The checks of one loader's or service's files. Any thread may call any method.

    Parts use one block of device memory, one after the other. It is allocated for the first part. It is freed when
    no chunk has had a new file for a while, as in a second epoch, and allocated again for the next new file.

    device_stream: of the GPU that checks files. The checks run on a separate CUDA stream.
    threads: the number of threads that check files on the CPU instead; 0 for the GPU.
    """

    def __init__(self, device_stream: DeviceStream, threads: int = 0) -> None:
        self._device_stream = device_stream.on_new_stream()
        self._threads = threads
        self._complete, self._damaged = KnownFiles(), KnownFiles()
        self._memory: queue.SimpleQueue[PrivateMemory[_Memory] | None] = queue.SimpleQueue()
        self._memory.put(None)
        self._unused = 0

    @staticmethod
    def shared_bytes(samples: int) -> int:
        """The size of memory for `share`, for a source of that many samples."""
        return 2 * min(samples, MAX_REMEMBERED) * np.dtype(np.uint32).itemsize

    def share(self, memory: NDArray[np.uint8]) -> None:
        """From now on remember in this memory which files were checked, and with what result.

        memory: uint8 [shared_bytes], zeros at first, that other processes with the same source use, too.
        """
        for files, own in zip((self._complete, self._damaged), memory.view(np.uint32).reshape(2, -1), strict=True):
            files.share(own)

    def complete(
        self,
        rows: NDArray[np.int64],
        payload: Payload,
        headers: Headers,
        indices: Sequence[int] | NDArray[np.int64] | None,
    ) -> NDArray[np.bool_]:
        """Which of these rows [n] of a payload are complete files. May wait for the GPU.

        headers: of all files of the payload; those of the rows are files that the engines decode.
        indices: of the payload's samples in the source. Without them every file is new, as those that a service gets.
        """
        if indices is None:
            return self._check(rows, payload, headers, _MOST_CPU_BYTES)
        samples, lengths = (np.asarray(x, np.int64)[rows] for x in (indices, payload.sizes))
        complete = self._complete.known(samples, lengths)
        new = ~(complete | self._damaged.known(samples, lengths))
        if not new.any():
            self._count_unused()
            return complete
        self._unused = 0
        complete[new] = self._check(rows[new], payload, headers)
        for files, which in ((self._complete, complete), (self._damaged, ~complete)):
            files.add(samples[new & which], lengths[new & which])
        return complete

    def _check(
        self, rows: NDArray[np.int64], payload: Payload, headers: Headers, most_cpu_bytes: int = MAX_BYTES
    ) -> NDArray[np.bool_]:
        """most_cpu_bytes: larger files are checked on the GPU in any case."""
        sizes = np.asarray(payload.sizes, np.int64)[rows]
        here = (sizes <= most_cpu_bytes) & (self._threads > 0)
        complete = np.zeros(len(rows), bool)
        if here.any():
            complete[here] = complete_on_cpu(rows[here], payload, headers, self._threads)
        if not here.all():
            complete[~here] = self._check_on_gpu(rows[~here], payload, headers)
        return complete

    def _check_on_gpu(self, rows: NDArray[np.int64], payload: Payload, headers: Headers) -> NDArray[np.bool_]:
        complete, files = np.zeros(len(rows), bool), describe(rows, payload, headers)
        offsets, sizes = files[:, _FILE], files[:, _LENGTH]
        order = np.flatnonzero(can_be_read(files))
        order = order[np.argsort(offsets[order], kind="stable")]
        for which in _parts(offsets[order], sizes[order]):
            part = order[which]
            part = part[np.argsort(-sizes[part], kind="stable")]  # the largest first
            complete[part] = self._check_part(files[part], payload)
        return complete

    def _check_part(self, files: NDArray[np.int64], payload: Payload) -> NDArray[np.bool_]:
        """Check files that are close together in the payload; they and the bytes between them are copied to the GPU."""
        offsets, sizes = files[:, _FILE], files[:, _LENGTH]
        start, stop = int(offsets.min()), int((offsets + sizes).max())
        with self._memory_for(stop - start) as memory:
            self._device_stream.copy_into(memory.files[: stop - start], torch.from_numpy(payload.buffer[start:stop]))
            files[:, _FILE] += memory.files.data_ptr() - start
            spaces = -(-(sizes - files[:, _SCAN] + MARGIN_BYTES) // _ALIGN) * _ALIGN
            places = files[:, _RESTARTS] + 2
            files[:, _DATA], files[:, _PLACES] = np.cumsum(spaces) - spaces, np.cumsum(places) - places
            sent = send_array(self._device_stream, files)
            with self._device_stream.queued():
                found = complete_files(sent, int((sizes > LARGE_BYTES).sum()), int(places.sum()), memory.workspace)
            return self._device_stream.receive(found).numpy().astype(bool)

    @contextmanager
    def _memory_for(self, size: int) -> Iterator[_Memory]:
        """Memory for a part of this size, once the part before is done. Raises LoaderTimeout if that takes too long."""
        memory = take_free(self._memory, _TURN_SECONDS, "the GPU did not check files")
        try:
            if memory is None:
                memory = PrivateMemory(self._device_stream, lambda: self._allocated(_PART_BYTES))
            yield memory.tensors if size <= _PART_BYTES else self._allocated(size)
        finally:
            self._memory.put(memory)

    def _count_unused(self) -> None:
        """A chunk had no new file: free the memory after many such chunks."""
        self._unused += 1
        if self._unused < _UNUSED_CHUNKS:
            return
        self._unused = 0
        with suppress(queue.Empty):  # a part is being checked
            if (memory := self._memory.get_nowait()) is not None:
                memory.free()
            self._memory.put(None)

    def _allocated(self, size: int) -> _Memory:
        device = self._device_stream.device
        with self._device_stream.queued():
            files = torch.empty(size, dtype=torch.uint8, device=device)
            count = _PART_FILES if size <= _PART_BYTES else 1
            return _Memory(files, Workspace.of(count, size + count * (MARGIN_BYTES + _ALIGN), device))


def _parts(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Group files that begin at these ascending places and have these sizes."""
    first = 0
    for i, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if i > first and (start + size - starts[first] > _PART_BYTES or i - first == _PART_FILES):
            yield slice(first, i)
            first = i
    if len(sizes):
        yield slice(first, len(sizes))
