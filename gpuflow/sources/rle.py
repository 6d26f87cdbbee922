"""COCO's run-length encoding of masks: its compressed text to run lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["run_lengths"]


def run_lengths(text: str) -> NDArray[np.int64]:
    """The run lengths that pycocotools compressed to a text. Raises ValueError if it is none of its texts.

    A character holds 5 bits of a number, lowest first, and whether more follow; the last one's highest bit is the sign.
    From the fourth number on, each is the difference to the one two places before it.
    """
    if not text:
        return np.zeros(0, np.int64)
    groups = np.frombuffer(text.encode("ascii") if text.isascii() else b" ", np.uint8).astype(np.int64) - 48
    if groups.min() < 0 or groups.max() > 63:
        raise ValueError("a character that is none of run lengths")
    is_last = groups & 0x20 == 0
    if not is_last[-1]:
        raise ValueError("the last run length is cut off")
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 12:
        raise ValueError("a run length of more than 60 bits")
    places = np.arange(len(groups)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((groups & 0x1F) << (5 * places), starts)
    numbers -= np.where(groups[ends] & 0x10 != 0, np.int64(1) << (5 * lengths), 0)
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers
