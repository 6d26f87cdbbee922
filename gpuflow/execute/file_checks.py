"""Which files of a chunk are complete. Each file of a source is checked once in a run, on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.execute.device_stream import DeviceStream
from gpuflow.execute.kernels.complete import FIELDS, LARGE_BYTES, MAX_BYTES, SPARE_BYTES, complete_files
from gpuflow.execute.known_files import KnownFiles
from gpuflow.sources import Payload

__all__ = ["FileChecks"]

_PART_BYTES, _PART_FILES = 1 << 25, 256
"""The files of a chunk are checked in parts of at most this size, or one larger file: a part needs GPU memory for twice
its bytes, and 74 kB for each file."""
_ALIGN = 8


class FileChecks:
    """The checks of one loader's or service's files. Any thread may call any method.

    device_stream: of the GPU that checks, which does so on a stream of its own.
    """

    def __init__(self, device_stream: DeviceStream) -> None:
        self._device_stream = device_stream.another()
        self._complete, self._damaged = KnownFiles(), KnownFiles()

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
        sizes = np.asarray(payload.sizes, np.int64)[rows]
        order = np.flatnonzero(sizes <= MAX_BYTES)
        order = order[np.argsort(np.asarray(payload.offsets, np.int64)[rows[order]], kind="stable")]
        found = [(order[part], self._check_part(rows[order[part]], payload, headers)) for part in _parts(sizes[order])]
        for part, results in found:
            complete[part] = results
        return complete

    def _check_part(self, rows: NDArray[np.int64], payload: Payload, headers: Headers) -> NDArray[np.bool_]:
        """Check files that lie one after the other. They are copied to the GPU with what lies between them."""
        offsets, sizes = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
        start, stop = int(offsets[0]), int(offsets[-1] + sizes[-1])
        files = self._device_stream.send(torch.from_numpy(payload.buffer[start:stop]))
        largest_first = np.argsort(-sizes, kind="stable")
        described, data_bytes, places = _describe(
            files.data_ptr() + (offsets - start)[largest_first], sizes[largest_first], headers, rows[largest_first]
        )
        (sent,) = self._device_stream.send_all([described])
        with self._device_stream.queued():
            found = complete_files(sent, int((sizes > LARGE_BYTES).sum()), data_bytes, places)
        complete = np.zeros(len(rows), bool)
        complete[largest_first] = self._device_stream.receive(found).numpy()
        return complete


def _parts(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Group files of these sizes, in their order."""
    start, total = 0, 0
    for i, size in enumerate(sizes.tolist()):
        if i > start and (total + size > _PART_BYTES or i - start == _PART_FILES):
            yield slice(start, i)
            start, total = i, 0
        total += size
    if len(sizes):
        yield slice(start, len(sizes))


def _describe(
    addresses: NDArray[np.int64], lengths: NDArray[np.int64], headers: Headers, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int, int]:
    """The files at these addresses as `complete_files` takes them: [n, len(FIELDS)], and the sizes of its memories."""
    described = np.zeros((len(rows), len(FIELDS)), np.int64)
    sampling, intervals = headers.sampling[rows].astype(np.int64), headers.intervals[rows]
    across, down = np.maximum(sampling >> 4, 1), np.maximum(sampling & 15, 1)
    units = (-(-headers.sizes[rows] // (8 * np.column_stack([down, across])))).prod(axis=1)
    restarts = np.where(intervals > 0, -(-units // np.maximum(intervals, 1)) - 1, 0)
    spaces = -(-(lengths - headers.scans[rows] + SPARE_BYTES) // _ALIGN) * _ALIGN
    data, places = np.cumsum(spaces), np.cumsum(restarts + 2)
    columns = {
        "file": addresses,
        "length": lengths,
        "scan": headers.scans[rows],
        "components": np.where(sampling > 0, 3, 1),
        "luma": across * down,
        "units": units,
        "interval": intervals,
        "restarts": restarts,
        "data": data - spaces,
        "places": places - restarts - 2,
    }
    for column, name in enumerate(FIELDS):
        described[:, column] = columns[name]
    return described, int(data[-1]), int(places[-1])
