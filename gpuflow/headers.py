"""The headers of a whole chunk: what `codecs.probe` says of each file.

Ordinary JPEGs are walked over all at once. Whatever is out of the ordinary is left to `probe`, so the two never differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuflow.codecs import Header, probe
from gpuflow.errors import BadSampleError
from gpuflow.sources import Payload
from gpuflow.walk import Walked, walk

__all__ = ["Headers", "read_headers"]


@dataclass(frozen=True, slots=True)
class Headers:
    """Of each file of a chunk. sizes [N, 2]: height, width as stored, in pixels. engine [N]: the JPEG engines take it.

    others: the header of each file that is sound but not for the engines. faults: why a file is bad, or None.
    """

    sizes: NDArray[np.int64]
    engine: NDArray[np.bool_]
    others: dict[int, Header]
    faults: list[BadSampleError | None]


def read_headers(payload: Payload, *, max_pixels: int, orientation: bool) -> Headers:
    """What `probe` says of each file. Unreadable files (of size 0) are faults of the stage `read`.

    The payload may bring what `walk` found.
    """
    count = len(payload)
    walked: Walked = payload.found if payload.found is not None else walk(payload, orientation=orientation)
    sizes, engine = walked
    engine = engine & (sizes.prod(axis=1) <= max_pixels)
    others: dict[int, Header] = {}
    faults: list[BadSampleError | None] = [None] * count
    for i in np.flatnonzero(~engine).tolist():
        if (error := payload.errors[i]) is not None:
            faults[i] = BadSampleError("read", error)
            continue
        try:
            header = probe(payload.sample(i), max_pixels=max_pixels, orientation=orientation)
        except BadSampleError as fault:
            faults[i] = fault
            continue
        sizes[i] = header.height, header.width
        engine[i] = header.engine
        if not header.engine:
            others[i] = header
    return Headers(sizes, engine, others, faults)
