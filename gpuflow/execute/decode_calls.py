"""Chooses which images share an nvJPEG call, over the chunk that is needed and the chunks after it.

A JPEG engine is set up anew wherever the chroma sampling changes from one image of a call to the next, and a call lasts
as long as its slowest engine. So the images of a call are of one kind: one chroma sampling, and ordinary or large.
Where a chunk has too few images of a kind for a whole call, images of the next chunks fill it up (the gain is measured
in experiments/real_data).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["CALL_IMAGES", "LARGE_PIXELS", "DecodeCall", "Undecoded", "kinds_of", "plan_calls", "split"]

CALL_IMAGES = 128
"""The largest number of images in one nvJPEG call. nvJPEG and the decode buffers need memory for all of them; with 64
a training step loses 7% of its speed instead of 3% (measured in experiments/gpu_path/NOTES.md)."""
LARGE_PIXELS, _LARGE_IMAGES = 1 << 20, 32
"""From how many pixels on an image is large, and the largest number of such images in one call."""
_LARGE, _SIZE_STEP = 1 << 8, 1 << 9
"""Bits of a kind above the sampling: large, and how many times four times as large."""


def kinds_of(frames: NDArray[np.int64]) -> NDArray[np.int64]:
    """The kind of each image, [N]: images of one call have the same. frames [N, 3]: height, width and sampling."""
    pixels = frames[:, 0] * frames[:, 1]
    large = np.maximum(0, np.log2(np.maximum(pixels, 1) / LARGE_PIXELS)).astype(np.int64) // 2
    kinds: NDArray[np.int64] = frames[:, 2].copy()
    kinds += np.where(pixels >= LARGE_PIXELS, _LARGE + _SIZE_STEP * large, 0)
    return kinds


@dataclass(slots=True)
class Undecoded:
    """The images of one chunk that no call has taken.

    kinds [N]: of all images of the chunk. spaces [N]: bytes that each needs when it is decoded.
    left [N]: which ones no call has taken; `plan_calls` changes it.
    """

    kinds: NDArray[np.int64]
    spaces: NDArray[np.int64]
    left: NDArray[np.bool_]

    @classmethod
    def all_of(cls, kinds: NDArray[np.int64], spaces: NDArray[np.int64]) -> Undecoded:
        return cls(kinds, spaces, np.ones(len(kinds), bool))

    def take(self, kind: int, images: int, space: int) -> NDArray[np.int64]:
        """Take the first images of a kind, at most so many and so many bytes: their numbers within the chunk."""
        found = np.flatnonzero(self.left & (self.kinds == kind))[:images]
        found = found[np.cumsum(self.spaces[found]) <= space]
        self.left[found] = False
        return found


class DecodeCall(NamedTuple):
    """The N images of one nvJPEG call, the largest first: the engines take them in turn, so each gets as much to do.

    chunks [N]: the place of each image's chunk in the sequence that `plan_calls` got. rows [N]: the image's number
    within its chunk. space: bytes for all of them when decoded.
    """

    chunks: NDArray[np.int64]
    rows: NDArray[np.int64]
    space: int


def plan_calls(chunks: Sequence[Undecoded], *, max_bytes: int) -> list[DecodeCall]:
    """The calls that decode all of the first chunk's images that are left, filled up with images of the others.

    Each has an image of the first chunk.

    Images of the other chunks are taken only if the first chunk has several kinds. If it has one, its calls have the
    same sizes as those of its neighbours, and decoding earlier would gain nothing.

    max_bytes: the largest space of a call; one larger image is alone in its call.
    """
    own = chunks[0]
    mixed = len(own.kinds) > 0 and bool((own.kinds != own.kinds[0]).any())
    calls: list[DecodeCall] = []
    for kind in np.unique(own.kinds[own.left]).tolist():
        most = _LARGE_IMAGES if kind & _LARGE else CALL_IMAGES
        rows = [own.take(kind, len(own.kinds), np.iinfo(np.int64).max)]
        images, space = len(rows[0]), int(own.spaces[rows[0]].sum())
        full, free = -(-images // most) * most, -(-space // max_bytes) * max_bytes
        for other in chunks[1:] if mixed else ():
            rows.append(other.take(kind, full - images, free - space))
            images, space = images + len(rows[-1]), space + int(other.spaces[rows[-1]].sum())
        numbers = np.repeat(np.arange(len(rows)), [len(x) for x in rows])
        spaces = np.concatenate([chunk.spaces[taken] for chunk, taken in zip(chunks, rows, strict=False)])
        order = np.argsort(-spaces, kind="stable")
        numbers, taken, spaces = numbers[order], np.concatenate(rows)[order], spaces[order]
        for part in split(spaces, most, max_bytes):
            if (numbers[part] == 0).any():
                calls.append(DecodeCall(numbers[part], taken[part], int(spaces[part].sum())))
            else:  # what was to fill the others up did not fit
                for number, row in zip(numbers[part].tolist(), taken[part].tolist(), strict=True):
                    chunks[number].left[row] = True
    return calls


def split(spaces: NDArray[np.int64], max_images: int, max_bytes: int) -> Iterator[slice]:
    """Group neighbours into calls of equal size, none above `max_images` or `max_bytes`; a larger image is alone."""
    count = len(spaces)
    even = -(-count // max(1, -(-count // max_images)))
    start, total = 0, 0
    for i, space in enumerate(spaces.tolist()):
        if i - start == even or (total and total + space > max_bytes):
            yield slice(start, i)
            start, total = i, 0
        total += space
    if count:
        yield slice(start, count)
