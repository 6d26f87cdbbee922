"""Checks the markers within a baseline JPEG's scan, without decoding it.

A scan's compressed data hold no markers but restart markers, in order and after every restart interval, and the end of
the image (ITU-T T.81, B.1.1.2 and B.2.4.4). What NVIDIA's JPEG engines make of a scan with others is not defined: for
such a file the pixels of one engine differed with the files that it decoded before. So only decoders on the CPU get it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["expected_restarts", "has_expected_markers"]

_FILL, _END, _FIRST_RESTART, _RESTARTS = 0xFF, 0xD9, 0xD0, 8


def expected_restarts(height: int, width: int, sampling: int, interval: int) -> int:
    """The number of restart markers in a scan.

    Args:
        height, width: of the image, in pixels.
        sampling: factors of the first component, horizontal * 16 + vertical, where chroma is 1x1; 0 if it is gray.
        interval: coded units (MCUs) between two of these markers; 0 if there are none.
    """
    if not interval:
        return 0
    across, down = (sampling >> 4, sampling & 15) if sampling else (1, 1)
    units = -(-width // (8 * across)) * -(-height // (8 * down))
    return -(-units // interval) - 1


def has_expected_markers(scan: NDArray[np.uint8], restarts: int) -> bool:
    """Whether a scan holds the right number of restart markers in order, then the end of the image, and no others.

    scan: the file's bytes from the first one after the scan's header on. What follows the end of the image is ignored.
    """
    marked = (scan[:-1] == 0xFF) & (scan[1:] != 0)  # before a zero, 0xFF is a byte of compressed data
    if not restarts and np.count_nonzero(marked) == 1:  # most files; finding the places takes three times as long
        return bool(scan[int(marked.argmax()) + 1] == _END)
    at = np.flatnonzero(marked)
    codes = scan[at + 1]
    order = _FIRST_RESTART + np.arange(restarts) % _RESTARTS
    if len(codes) <= restarts or (codes[:restarts] != order).any():
        return False
    at, codes = at[restarts:], codes[restarts:]
    end = int(np.argmax(codes == _END))  # any number of fill bytes may precede a marker
    return bool(codes[end] == _END and (codes[:end] == _FILL).all() and at[end] - at[0] == end)
