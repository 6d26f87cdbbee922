"""Prepares a chunk for a GPU: reads headers, draws random parameters, and makes tables for nvJPEG and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers, read_headers
from gpuflow.execute.chunk_tables import ChunkTables
from gpuflow.execute.passes import Pass, draw_passes
from gpuflow.execute.pixel_steps import rows_are_short
from gpuflow.pipeline.program import any_misfit
from gpuflow.pipeline.stage import Decoder, Keys
from gpuflow.pipeline.views import Output
from gpuflow.sources import SPARE_BYTES, Payload

__all__ = ["ChunkScan", "ChunkScanner"]


class ChunkScan(NamedTuple):
    """Holds what `ChunkScanner` finds out about one chunk.

    headers: of all its files.
    rows [n]: the files that nvJPEG can decode and the stages can use.
    progressive [n]: which of these it can decode only once they are rewritten, see `decode.baseline`.
    draws: for each output and each of its passes the random parameters for these rows. tables: of these rows.
    """

    headers: Headers
    rows: NDArray[np.int64]
    progressive: NDArray[np.bool_]
    draws: list[list[Any]]
    tables: ChunkTables

    def take(self, kept: NDArray[np.bool_], scanner: ChunkScanner, keys: Keys) -> ChunkScan:
        """The same for some of the rows."""
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

    outputs: of the program. passes: for each output the passes that make it. with_regions: see `ChunkTables.of`.
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
        spare = _clear_after(payload, rows)
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
        return ChunkScan(headers, rows, headers.progressive[rows], draws, tables)

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
