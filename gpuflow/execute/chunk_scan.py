"""Prepares a chunk for decoding on a GPU: reads headers, draws random parameters, makes tables for nvJPEG and kernels.

It also rewrites progressive files for the JPEG engines. If worker processes read, they do this work: it is most of the
Python code that a chunk needs, and a training loop in this process needs the interpreter for its own steps (measured in
experiments/real_data/NOTES.md). So nothing here needs torch or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.baseline import rewrite_progressive, room_for
from gpuflow.decode.chunk_headers import Headers, read_headers
from gpuflow.decode.complete import complete_on_cpu
from gpuflow.execute.chunk_tables import ChunkTables
from gpuflow.execute.passes import Pass, draw_passes
from gpuflow.execute.pixel_steps import rows_are_short
from gpuflow.pipeline.program import any_misfit
from gpuflow.pipeline.stage import Decoder, Keys
from gpuflow.pipeline.views import Output
from gpuflow.sources import SPARE_BYTES, Payload

__all__ = ["Checked", "ChunkScan", "ChunkScanner", "Prescan"]


class Checked(NamedTuple):
    """For some rows [n] of a chunk, which files were checked, and which of those are complete."""

    checked: NDArray[np.bool_]
    complete: NDArray[np.bool_]

    def take(self, kept: NDArray[np.bool_]) -> Checked:
        """The same for some of the rows."""
        return Checked(self.checked[kept], self.complete[kept])


class ChunkScan(NamedTuple):
    """The result of a `ChunkScanner` for one chunk.

    offsets, sizes, errors: of the payload that it scanned. headers: of all its files.
    rows [n]: the files that nvJPEG can decode and the stages can use.
    progressive [n]: which of these it can decode only once they are rewritten, see `decode.baseline`.
    draws: for each output and each of its passes the random parameters for these rows. tables: of these rows.
    found: which of these rows are complete files; None if that was not asked.
    rewritten: whether the progressive files are rewritten. The results are in the payload's buffer after its files, and
        the tables have their places; files that cannot be rewritten are then left out of the rows. False if the buffer
        has no room.
    room: bytes that the buffer needs for the rewritten files.
    """

    offsets: Sequence[int]
    sizes: Sequence[int]
    errors: Sequence[str | None]
    headers: Headers
    rows: NDArray[np.int64]
    progressive: NDArray[np.bool_]
    draws: list[list[Any]]
    tables: ChunkTables
    found: Checked | None = None
    rewritten: bool = False
    room: int = 0

    def is_of(self, payload: Payload) -> bool:
        """Whether this payload is the one that was scanned: a source may change what a process read for it."""
        pairs = (self.offsets, payload.offsets), (self.sizes, payload.sizes), (self.errors, payload.errors)
        return all(list(scanned) == list(given) for scanned, given in pairs)

    def take(self, kept: NDArray[np.bool_], scanner: ChunkScanner, keys: Keys) -> ChunkScan:
        """The same for some of the rows."""
        rows = self.rows[kept]
        draws, tables = scanner.draw(keys, rows, self.headers.upright_sizes), self.tables.take(kept)
        return self._replace(
            rows=rows,
            progressive=self.progressive[kept],
            draws=draws,
            tables=tables,
            found=None if self.found is None else self.found.take(kept),
        )


Prescan = Callable[[Payload, Keys, NDArray[np.bool_] | None], ChunkScan]
"""What a process that reads files calls on each payload, its samples' random keys, and which of them to check, so that
the process that trains need not. It and its results can be pickled."""


@dataclass(frozen=True, slots=True)
class ChunkScanner:
    """Scans chunks for one program.

    outputs: of the program. passes: for each output the passes that make it.
    threads: the number of threads that check files. rewrite_threads: the number of those that rewrite progressive ones.
    with_regions: see `ChunkTables.of`.
    """

    decoder: Decoder
    outputs: tuple[Output, ...]
    passes: tuple[tuple[Pass, ...], ...]
    threads: int = 1
    rewrite_threads: int = 1
    with_regions: bool = False

    def __call__(self, payload: Payload, keys: Keys, unchecked: NDArray[np.bool_] | None = None) -> ChunkScan:
        """Scan the files of a payload whose samples have these keys. Writes zeros after those that nvJPEG can decode,
        because the engines read a little ahead, and rewrites progressive ones if the buffer has room for them.

        unchecked: which of the files to check, if nvJPEG can decode them, [N]; None for none.
        """
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
        spare = _clear_after(payload, rows)
        to_rewrite = headers.progressive[rows]
        chosen = None if unchecked is None else unchecked[rows] & ~to_rewrite
        found = self._check(rows, payload, headers, chosen) if chosen is not None and chosen.any() else None
        starts, lengths = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
        tables = ChunkTables.of(
            headers,
            rows,
            (starts, lengths + spare),
            [own[0] for own in draws],
            [own[0].result.fixed for own in self.passes],
            channels=1 if decoder.color == "gray" else 3,
            with_regions=self.with_regions,
        )
        read = payload.offsets, payload.sizes, payload.errors
        scan = ChunkScan(*read, headers, rows, to_rewrite, draws, tables, found)
        return self._rewrite(scan, payload, keys) if to_rewrite.any() else scan

    def _rewrite(self, scan: ChunkScan, payload: Payload, keys: Keys) -> ChunkScan:
        """The scan once progressive files are rewritten to the end of the payload's buffer, if that has room."""
        which = scan.progressive
        end = max(map(sum, zip(payload.offsets, payload.sizes, strict=True))) + SPARE_BYTES
        rest, room = payload.buffer[end:], room_for(payload, scan.rows[which])
        if room > len(rest):
            return scan._replace(room=room)
        found = rewrite_progressive(payload, scan.rows[which], lambda size: rest[:size], self.rewrite_threads)
        scan = scan._replace(tables=scan.tables.with_files(which, found, end), rewritten=True, room=room)
        kept = ~which
        kept[which] = found.sizes > 0
        return scan if kept.all() else scan.take(kept, self, keys)

    def _check(
        self, rows: NDArray[np.int64], payload: Payload, headers: Headers, unchecked: NDArray[np.bool_]
    ) -> Checked:
        """Check those of the rows [n] that are unchecked."""
        complete = np.zeros(len(rows), bool)
        complete[unchecked] = complete_on_cpu(rows[unchecked], payload, headers, self.threads)
        return Checked(unchecked, complete)

    def draw(self, keys: Keys, rows: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[list[Any]]:
        """For each output and each of its passes the random parameters of these rows [n] of a chunk.

        keys, sizes [N, 2]: of the whole chunk; height and width of the upright images.
        """
        own = keys.take(rows)
        pairs = zip(self.outputs, self.passes, strict=True)
        return [draw_passes(passes, output.keys_of(own), sizes[rows]) for output, passes in pairs]


def _clear_after(payload: Payload, rows: NDArray[np.int64]) -> NDArray[np.int64]:
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
