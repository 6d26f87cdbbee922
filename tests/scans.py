"""What the checks of a JPEG's compressed data need of its header."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.codecs import engine_sampling, probe, scan_start
from tests.images import as_array

__all__ = ["Scan", "scan_of"]


class Scan(NamedTuple):
    """The arguments of `complete_scan.check_scan`."""

    data: NDArray[np.uint8]
    start: int
    frame: tuple[int, int, int]
    interval: int


def scan_of(data: bytes) -> Scan:
    """Of a file that the engines may decode."""
    file = as_array(data)
    header = probe(file)
    sampling = engine_sampling(file, header)
    assert sampling is not None
    start, interval = scan_start(file)
    return Scan(file, start, (*header.size, sampling), interval)
