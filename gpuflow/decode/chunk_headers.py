"""The headers of a whole chunk: what `codecs.probe` says of each file.

Ordinary JPEGs are walked over all at once. Whatever is out of the ordinary is left to `probe`, so the two never differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.codecs import Header, engine_sampling, probe
from gpuflow.decode.header_scan import Walked, walk
from gpuflow.errors import BadSampleError
from gpuflow.sources import Payload

__all__ = ["Headers", "read_headers"]


@dataclass(frozen=True, slots=True)
class Headers:
    """Of each file of a chunk. sizes [N, 2]: height, width as stored, in pixels. engine [N]: the JPEG engines take it.
    sampling [N]: see `engine_sampling`, 0 for others.

    others: the header of each file that is sound but not for the engines. faults: why a file is bad, or None.
    """

    sizes: NDArray[np.int64]
    engine: NDArray[np.bool_]
    sampling: NDArray[np.uint8]
    others: dict[int, Header]
    faults: list[BadSampleError | None]


def read_headers(payload: Payload, *, max_pixels: int, max_scans: int, orientation: bool) -> Headers:
    """What `probe` says of each file. Unreadable files (of size 0) are faults of the stage `read`.

    The payload may bring what `walk` found.
    """
    count = len(payload)
    walked: Walked = payload.prescan if payload.prescan is not None else walk(payload, orientation=orientation)
    sizes, engine, sampling = walked
    engine = engine & (sizes.prod(axis=1) <= max_pixels)
    others: dict[int, Header] = {}
    faults: list[BadSampleError | None] = [None] * count
    for i in np.flatnonzero(~engine).tolist():
        if (error := payload.errors[i]) is not None:
            faults[i] = BadSampleError("read", error)
            continue
        try:
            header = probe(payload.sample(i), max_pixels=max_pixels, max_scans=max_scans, orientation=orientation)
        except BadSampleError as fault:
            faults[i] = fault
            continue
        sizes[i] = header.height, header.width
        factors = engine_sampling(payload.sample(i), header)
        engine[i], sampling[i] = factors is not None, factors or 0
        if factors is None:
            others[i] = header
    return Headers(sizes, engine, sampling, others, faults)
