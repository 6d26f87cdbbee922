"""Prepares a chunk for a GPU: reads headers, draws random parameters, and makes tables for nvJPEG and kernels.

Also checks which files of a chunk are complete, each file of a source once in a run, by one rank of a host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.decode.chunk_files import Headers, Rewritten, find_complete, read_headers
from gpuflow.decode.header import FLIPPED_X, FLIPPED_Y, SWAPPED
from gpuflow.execute.cpu.runner import union_of
from gpuflow.execute.gpu.passes import Pass, draw_passes
from gpuflow.execute.packing import table_of
from gpuflow.native.library import NativePool
from gpuflow.pipeline.program import any_misfit
from gpuflow.pipeline.stage import Decoder, Keys
from gpuflow.pipeline.views import Output
from gpuflow.sources import SPARE_BYTES, Payload

ROW_BYTES = (1 << 31) - 1
"""The most bytes from the first to the last pixel of an upright row: kernels compute them in 32 bits."""
_FLIPS = np.array([(turn in FLIPPED_Y, turn in FLIPPED_X) for turn in range(9)])
"""[9, 2]: for each orientation whether rows, and whether columns, are in reverse order."""


def rows_are_short(sizes: Ints, orientations: NDArray[np.integer]) -> Bools:
    """Return for each image if kernels can read it upright, [n]: see `ROW_BYTES`. Arguments: as of `pixel_steps`.

    They cannot if an image of more than 700 million pixels is turned by 90 degrees: an upright row then has a pixel of
    each stored one.
    """
    short: Bools = (orientations < SWAPPED) | (3 * sizes.prod(axis=1) <= ROW_BYTES)
    return short


def pixel_steps(sizes: Ints, channels: int, orientations: NDArray[np.integer] | None = None) -> Ints:
    """Return the steps that read interleaved uint8 images upright, [n, 3], in bytes: from the first byte to the upper
    left pixel, and from there to the next row's and the next column's.

    sizes [n, 2]: height and width as stored, one row after the other. orientations [n]: as EXIF counts them; by default
    nothing is turned.
    """
    if orientations is None or (orientations == 1).all():
        return table_of(len(sizes), [0, sizes[:, 1] * channels, channels])
    stored = table_of(len(sizes), [sizes[:, 1] * channels, channels])
    swapped = orientations >= SWAPPED
    steps = np.where(swapped[:, None], stored[:, ::-1], stored)
    ends = np.where(swapped[:, None], sizes[:, ::-1], sizes) - 1  # the last row and column of the upright image
    flips = _FLIPS[orientations]
    starts = (ends * steps * flips).sum(axis=1)
    return np.column_stack([starts, np.where(flips, -steps, steps)])


def regions_around(
    boxes: Sequence[Ints], sizes: Ints, channels: int, orientations: NDArray[np.integer]
) -> tuple[Ints, Ints]:
    """Return the smallest part of each of n images that has all pixels of some boxes, and one pixel at least.

    boxes: each [n, 4], y, x, height, width in the upright images. Other arguments: as of `pixel_steps`.

    Returns:
        x, y, width, height of each part in the stored image, [n, 4]. And the steps [n, 3] that read the upright image
        if memory holds this part alone, see `pixel_steps`; the upper left pixel may be outside.
    """
    swapped, is_turned = (orientations >= SWAPPED)[:, None], bool((orientations != 1).any())
    upright = np.where(swapped, sizes[:, ::-1], sizes) if is_turned else sizes
    starts, ends = union_of(boxes)
    starts = np.maximum(np.minimum(starts, upright - 1), 0)
    ends = np.maximum(np.minimum(ends, upright), starts + 1)
    corners, sides = starts, ends - starts
    if is_turned:
        corners = np.where(_FLIPS[orientations], upright - ends, starts)
        corners, sides = (np.where(swapped, pairs[:, ::-1], pairs) for pairs in (corners, sides))
    steps = pixel_steps(sides, channels, orientations if is_turned else None)
    steps[:, 0] -= starts[:, 0] * steps[:, 1] + starts[:, 1] * steps[:, 2]
    return np.concatenate([corners[:, ::-1], sides[:, ::-1]], axis=1), steps


_ALIGN = 256


class ChunkTables(NamedTuple):
    """Of n files that nvJPEG decodes.

    entries [n, 7]: as `JpegBatch.of` takes them. samplings, pixels, spaces [n]: as `Undecoded` takes them.
    steps [n, 3]: the `pixel_steps` of what is decoded.
    """

    entries: Ints
    samplings: Ints
    pixels: Ints
    spaces: Ints
    steps: Ints

    def with_files(self, which: Bools, files: Rewritten) -> ChunkTables:
        """Return the tables if the files `which` are read in their rewritten form."""
        entries, samplings = self.entries.copy(), self.samplings.copy()
        entries[which, 0] = files.offsets + files.buffer.ctypes.data
        entries[which, 1] = files.sizes + SPARE_BYTES
        samplings[which] = files.sampling
        return self._replace(entries=entries, samplings=samplings)

    def take(self, kept: Bools) -> ChunkTables:
        """Return the tables of some of the files."""
        return ChunkTables(*(table[kept] for table in self))


class ChunkScan(NamedTuple):
    """Holds what `ChunkScanner` finds out about one chunk.

    headers: of all its files.
    rows [n]: the files that nvJPEG can decode and the stages can use.
    progressive [n]: which of these it can decode only once they are rewritten, see `decode.baseline`.
    draws: for each output and each of its passes the random parameters for these rows. tables: of these rows.
    """

    headers: Headers
    rows: Ints
    progressive: Bools
    draws: list[list[Any]]
    tables: ChunkTables

    def take(self, kept: Bools, scanner: ChunkScanner, keys: Keys) -> ChunkScan:
        """Return the scan of some of the rows."""
        rows = self.rows[kept]
        return self._replace(
            rows=rows,
            progressive=self.progressive[kept],
            draws=scanner.draw(keys, rows, self.headers.upright_sizes),
            tables=self.tables.take(kept),
        )


@dataclass(frozen=True, slots=True)
class ChunkScanner:
    """Scans chunks for one program.

    outputs: of the program. passes: for each output the passes that make it. with_regions: whether only the parts of
        images are decoded that the first passes read.
    """

    decoder: Decoder
    outputs: tuple[Output, ...]
    passes: tuple[tuple[Pass, ...], ...]
    with_regions: bool = False

    def __call__(self, payload: Payload, keys: Keys) -> ChunkScan:
        """Scan the files of a payload whose samples have these keys. Writes zeros after those that nvJPEG can decode,
        because the engines read a little ahead."""
        decoder = self.decoder
        headers = read_headers(
            payload,
            max_pixels=decoder.max_pixels,
            max_scans=decoder.max_scans,
            orientation=None if decoder.orientation is None else decoder.orientation == "apply",
            formats=decoder.formats,
        )
        short = rows_are_short(headers.sizes, headers.orientations)
        rows = np.flatnonzero((headers.engine | headers.progressive) & short)
        sizes = headers.upright_sizes
        draws = self.draw(keys, rows, sizes)
        misfit = any_misfit(chain.from_iterable(draws), len(rows))
        if misfit.any():  # the CPU runs these, and reports what is wrong with each
            rows = rows[~misfit]
            draws = self.draw(keys, rows, sizes)
        tables = self._tables(payload, headers, rows, [own[0].box for own in draws])
        return ChunkScan(headers, rows, headers.progressive[rows], draws, tables)

    def _tables(self, payload: Payload, headers: Headers, rows: Ints, boxes: Sequence[Ints]) -> ChunkTables:
        """Make the tables for these rows [n] of a payload.

        boxes: for each output what its first pass reads, [n, 4], as `regions_around` takes them.
        """
        spare = _clear_after(payload, rows)
        starts, lengths = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
        files, channels = payload.buffer.ctypes.data + starts, 1 if self.decoder.color == "gray" else 3
        sizes, orientations = headers.sizes[rows], headers.orientations[rows]
        if not self.with_regions:
            boxes = [table_of(len(rows), [0, 0, headers.upright_sizes[rows]])]
        regions, steps = regions_around(boxes, sizes, channels, orientations)
        pitches = regions[:, 2] * channels
        return ChunkTables(
            entries=table_of(len(rows), [files, lengths + spare, pitches, regions]),
            samplings=headers.sampling[rows].astype(np.int64),
            pixels=sizes[:, 0] * sizes[:, 1],
            spaces=-(-pitches * regions[:, 3] // _ALIGN) * _ALIGN,
            steps=steps,
        )

    def draw(self, keys: Keys, rows: Ints, sizes: Ints) -> list[list[Any]]:
        """Draw the parameters of these rows [n] of a chunk, for each output and each of its passes.

        keys, sizes [N, 2]: of the whole chunk; height and width of the upright images.
        """
        own = keys.take(rows)
        pairs = zip(self.outputs, self.passes, strict=True)
        return [draw_passes(passes, output.keys_of(own), sizes[rows]) for output, passes in pairs]


def _clear_after(payload: Payload, rows: Ints) -> Ints:
    """Write zeros after these files. Returns their number for each file, [n].

    Without room after a file none are written; that occurs if `sources.lay_out` did not lay the payload out.
    """
    if not len(rows):
        return rows
    begins = np.sort(np.append(np.asarray(payload.offsets, np.int64), len(payload.buffer)))
    ends = np.asarray(payload.offsets, np.int64)[rows] + np.asarray(payload.sizes, np.int64)[rows]
    room = begins[np.searchsorted(begins, ends)] - ends >= SPARE_BYTES
    if room.any():
        payload.buffer[ends[room][:, None] + np.arange(SPARE_BYTES)] = 0
    return np.where(room, SPARE_BYTES, 0)


MAX_REMEMBERED = 1 << 26
"""The largest number of samples that are remembered, with eight bytes each."""


class FileChecks:
    """Checks the files of one loader or service, and remembers the results. Any thread may call any method."""

    def __init__(self) -> None:
        self._results, self._lock = np.zeros(0, np.int64), threading.Lock()
        """For each sample 0 if nothing is known, or the bytes of its file, as a negative number if it is damaged."""
        self._most = MAX_REMEMBERED

    @staticmethod
    def shared_bytes(samples: int) -> int:
        """Return the size of memory for `share`, for a source of this number of samples."""
        return min(samples, MAX_REMEMBERED) * np.dtype(np.int64).itemsize

    def share(self, memory: Bytes) -> None:
        """Remember in this memory, from now on, which files were checked, and with what result.

        memory: uint8 [shared_bytes], zeros at first, that other processes with the same source use, too. What is known
            here already is written to it.
        """
        shared = memory.view(np.int64)
        with self._lock:
            own = self._results[: len(shared)]
            np.copyto(shared[: len(own)], own, where=own != 0)
            self._results, self._most = shared, len(shared)

    def complete(
        self,
        rows: Ints,
        payload: Payload,
        headers: Headers,
        indices: Sequence[int] | Ints | None,
        pool: NativePool | None = None,
    ) -> Bools:
        """Return which of these rows [n] of a payload are complete files.

        headers: of all files of the payload; those of the rows are files that the engines decode.
        indices: of the payload's samples in the source. Without them every file is new, as those that a service gets.
        pool: whose threads read the new files; by default the calling thread does.
        """
        if indices is None:
            return find_complete(rows, payload, headers, pool)
        samples, lengths = (np.asarray(x, np.int64)[rows] for x in (indices, payload.sizes))
        known = self.known(samples)
        complete: Bools = known == lengths
        new = np.abs(known) != lengths
        if new.any():
            complete[new] = find_complete(rows[new], payload, headers, pool)
            self.remember(samples[new], np.where(complete, lengths, -lengths)[new])
        return complete

    def known(self, samples: Ints) -> Ints:
        """Return the result of the last check of these samples [n], see `_results`."""
        results = self._results
        inside = samples < len(results)
        known = np.zeros(len(samples), np.int64)
        known[inside] = results[samples[inside]]
        return known

    def remember(self, samples: Ints, results: Ints) -> None:
        """Remember the results of checks of samples [n]. Very high indices are not remembered."""
        with self._lock:
            kept = samples < self._most
            need = int(samples[kept].max(initial=-1)) + 1
            if need > len(self._results):
                grown = np.zeros(min(max(need, 2 * len(self._results)), self._most), np.int64)
                grown[: len(self._results)] = self._results
                self._results = grown
            self._results[samples[kept]] = results[kept]
