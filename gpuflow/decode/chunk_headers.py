"""Reads the headers of a whole chunk: for each file, the result of `codecs.probe`.

`header_scan` reads the headers of ordinary JPEGs by C code. `probe` reads every other file, so the results are equal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.codecs import engine_sampling, probe, scan_start
from gpuflow.decode.header import SWAPPED
from gpuflow.decode.header_scan import scan_headers
from gpuflow.errors import BadSampleError
from gpuflow.sources import Payload

__all__ = ["Headers", "read_headers"]

_GRAY_OR_COLOR = 1, 3
"""Numbers of channels."""


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a chunk's N files.

    sizes [N, 2]: height, width as stored, in pixels. orientations [N]: as EXIF counts them, 1 to 8; 1 if the file says
    nothing, or if it was not read. engine [N]: whether the JPEG engines decode the file.
    sampling [N]: see `engine_sampling`; 0 for files that the engines do not decode.
    scans, intervals [N]: see `scan_start`; valid for files that the engines decode.
    tags [N]: EXIF orientations that are not applied and that `decode` does not mention; else 1.
    progressive [N]: whether the file is a progressive JPEG, gray or in color. faults [N]: why a file is bad, or None.
    jpegs [N]: whether the file is a JPEG, gray or in color.
    """

    sizes: NDArray[np.int64]
    orientations: NDArray[np.uint8]
    engine: NDArray[np.bool_]
    sampling: NDArray[np.uint8]
    scans: NDArray[np.int64]
    intervals: NDArray[np.int64]
    progressive: NDArray[np.bool_]
    faults: list[BadSampleError | None]
    tags: NDArray[np.uint8]
    jpegs: NDArray[np.bool_]

    @property
    def upright_sizes(self) -> NDArray[np.int64]:
        """Height and width of the upright images, [N, 2]."""
        swapped = self.orientations >= SWAPPED
        return np.where(swapped[:, None], self.sizes[:, ::-1], self.sizes) if swapped.any() else self.sizes


def read_headers(
    payload: Payload, *, max_pixels: int, max_scans: int, orientation: bool | None, formats: Collection[str] = ()
) -> Headers:
    """Return the header of each file. Unreadable files (of size 0) are faults of the stage `read`.

    orientation: whether to read it. None: read it as `Headers.tags`, to count such files.
    """
    count, read = len(payload), orientation is not False
    engine, progressive, sizes, orientations, sampling, scans, intervals = scan_headers(
        payload, max_scans=max_scans, orientation=read
    )
    allowed = sizes.prod(axis=1) <= max_pixels
    engine, progressive = engine & allowed, progressive & allowed
    faults: list[BadSampleError | None] = [None] * count
    jpegs = engine | progressive
    for i in np.flatnonzero(~(engine | progressive)).tolist():
        orientations[i] = 1
        if (error := payload.errors[i]) is not None:
            faults[i] = BadSampleError("read", error)
            continue
        try:
            header = probe(
                payload.sample(i),
                max_pixels=max_pixels,
                max_scans=max_scans,
                orientation=read,
                formats=formats,
            )
        except BadSampleError as fault:
            faults[i] = fault.with_traceback(None)  # which refers to this frame, and that to all samples
            continue
        sizes[i], orientations[i] = header.size, header.orientation
        jpegs[i] = header.format == "jpeg" and header.channels in _GRAY_OR_COLOR
        factors = engine_sampling(payload.sample(i), header)
        engine[i], sampling[i] = factors is not None, factors or 0
        if factors is None:
            progressive[i] = jpegs[i] and header.progressive
        else:
            scans[i], intervals[i] = scan_start(payload.sample(i))
    tags = np.ones_like(orientations)
    if orientation is None:
        orientations, tags = tags, orientations
    return Headers(sizes, orientations, engine, sampling, scans, intervals, progressive, faults, tags, jpegs)
