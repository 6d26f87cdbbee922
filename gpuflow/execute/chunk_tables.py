"""Tables with what nvJPEG and the first passes need of each image of a chunk, without any address.

The process that reads a chunk makes them (`execute/chunk_scan.py`), so nothing here needs torch. The process that
trains adds the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.baseline import Rewritten
from gpuflow.decode.chunk_headers import Headers
from gpuflow.execute.pixel_steps import Regions
from gpuflow.execute.resampling_plan import resampling_plan_of
from gpuflow.execute.tables import table_of
from gpuflow.pipeline.program import Resampling, Warping
from gpuflow.sources import SPARE_BYTES

__all__ = ["ChunkTables"]

_ALIGN = 256


class ChunkTables(NamedTuple):
    """Of n files that nvJPEG decodes.

    entries [n, 7]: as `JpegBatch.of` takes them, but where a file begins in the payload instead of its address.
    samplings, pixels, spaces [n]: as `Undecoded` takes them. steps [n, 3]: the `pixel_steps` of what is decoded.
    plans: for each output the plan of its first pass (`resampling_plan_of`), where the first column is the first one of
        `steps` and the last one 0; None if the pass is no resampling, or if its results differ in size.
    """

    entries: NDArray[np.int64]
    samplings: NDArray[np.int64]
    pixels: NDArray[np.int64]
    spaces: NDArray[np.int64]
    steps: NDArray[np.int64]
    plans: list[NDArray[np.int64] | None]

    @classmethod
    def of(
        cls,
        headers: Headers,
        rows: NDArray[np.int64],
        files: Sequence[NDArray[np.int64]],
        draws: Sequence[Resampling | Warping],
        fixed: Sequence[bool],
        *,
        channels: int,
        with_regions: bool,
    ) -> ChunkTables:
        """The tables for these rows [n] of a chunk.

        Args:
            headers: of all its files.
            files: where each row's file begins in the payload and how many bytes of it nvJPEG gets, [n] each.
            draws, fixed: for each output the random parameters of its first pass, and whether its results are of one
                size.
            channels: of the decoded images.
            with_regions: whether only the parts of images are decoded that the first passes read.
        """
        sizes, orientations = headers.sizes[rows], headers.orientations[rows]
        if with_regions:
            regions = Regions.around([draw.box for draw in draws], sizes, channels, orientations)
        else:
            regions = Regions.whole(sizes, channels, orientations)
        x, y, width, height, steps = regions
        pitches = width * channels
        return cls(
            entries=table_of(len(rows), [*files, pitches, x, y, width, height]),
            samplings=headers.sampling[rows].astype(np.int64),
            pixels=sizes[:, 0] * sizes[:, 1],
            spaces=-(-pitches * height // _ALIGN) * _ALIGN,
            steps=steps,
            plans=[
                resampling_plan_of(draw, steps, 0) if has_one_size and isinstance(draw, Resampling) else None
                for draw, has_one_size in zip(draws, fixed, strict=True)
            ],
        )

    def with_files(self, which: NDArray[np.bool_], files: Rewritten, start: int) -> ChunkTables:
        """The same if those `which` are read in their rewritten form, whose offsets count from `start`."""
        entries, samplings = self.entries.copy(), self.samplings.copy()
        entries[which, 0] = files.offsets + start
        entries[which, 1] = files.sizes + SPARE_BYTES
        samplings[which] = files.sampling
        return self._replace(entries=entries, samplings=samplings)

    def take(self, kept: NDArray[np.bool_]) -> ChunkTables:
        """The same for some of the files."""
        *tables, plans = self
        entries, samplings, pixels, spaces, steps = (table[kept] for table in tables)
        taken = [None if plan is None else plan[kept] for plan in plans]
        return ChunkTables(entries, samplings, pixels, spaces, steps, taken)
