"""Chooses which images share an nvJPEG call, over the chunk that is needed and the chunks after it.

A JPEG engine is set up anew wherever the chroma sampling changes from one image of a call to the next, and a call lasts
as long as its slowest engine. So the images of a call have one sampling and are decoded in descending order of size.
Where a chunk has too few images of a sampling for a whole call, images of the next chunks fill it up (the gain is
measured in experiments/real_data).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gpuflow.arrays import Ints

CALL_IMAGES = 128
"""The largest number of images in one nvJPEG call. nvJPEG and the decode buffers need memory for all of them; with 64
a training step loses 7% of its speed instead of 3% (measured in experiments/gpu_path/NOTES.md)."""
AHEAD = 3
"""The number of later chunks whose images may fill up a chunk's calls. With more, calls are hardly fuller."""
_LATER_IMAGES = 3 * CALL_IMAGES
"""The largest number of such images that are decoded and not in their batches yet. With 256, ordinary photographs need
3.8 calls for a chunk instead of 2.5 in a model, and a training keeps 0.833 of its speed instead of 0.863 (measured in
experiments/real_data/NOTES.md)."""
_NONE, _ALL = np.zeros(0, np.int64), slice(None)


def later_images(chunk: int) -> int:
    """Return the largest number of images that are decoded for later chunks, if a chunk has this many."""
    return min(_LATER_IMAGES, AHEAD * chunk)


class Undecoded:
    """The images of one chunk that no call has taken.

    samplings, pixels [N]: of all images of the chunk. spaces [N]: bytes that each needs when it is decoded, which may
    be a part of it alone.
    """

    def __init__(self, samplings: Ints, pixels: Ints, spaces: Ints) -> None:
        self.samplings, self.pixels, self.spaces = samplings, pixels, spaces
        self._left = {one: np.flatnonzero(samplings == one) for one in sorted(set(samplings.tolist()))}
        self.mixed = len(self._left) > 1
        """Whether the chunk has images of several samplings."""

    def samplings_left(self) -> Iterator[int]:
        """Yield the samplings of images that no call has taken, those of fewest images first."""
        for sampling, rows in sorted(self._left.items(), key=lambda item: len(item[1])):
            if len(rows):
                yield sampling

    def take(self, sampling: int, images: int | None = None, space: int = 0) -> Ints:
        """Take all images of a sampling, or the first ones. Returns their numbers within the chunk.

        images, space: the largest number of images and of bytes to take; all are taken if `images` is None.
        """
        rows = self._left.get(sampling, _NONE)
        count = len(rows)
        if images is not None and count:
            count = int(np.searchsorted(np.cumsum(self.spaces[rows[:images]]), space, side="right"))
        self._left[sampling] = rows[count:]
        return rows[:count]

    def give_back(self, rows: Ints) -> None:
        """Give back images of one sampling that were taken, but that no call decodes."""
        sampling = int(self.samplings[rows[0]])
        self._left[sampling] = np.sort(np.concatenate([self._left[sampling], rows]))


class CallPart(NamedTuple):
    """The images of one chunk in a call.

    chunk: the chunk's place in the sequence that `plan_calls` got. where [m]: the images' numbers within the call, or a
    slice of all of them. rows [m]: their numbers within the chunk.
    """

    chunk: int
    where: Ints | slice
    rows: Ints


class DecodeCall(NamedTuple):
    """The N images of one nvJPEG call, the largest first: the engines take them in turn, so each gets as much to do.

    parts: of each chunk that has any of them, in the chunks' order. spaces [N]: bytes that each needs when it is
    decoded. sampling: of all of them.
    """

    parts: Sequence[CallPart]
    spaces: Ints
    sampling: int

    def __len__(self) -> int:
        return len(self.spaces)

    def give_back(self, chunks: list[Undecoded]) -> None:
        """Return the images of this call, which is not run."""
        for part in self.parts:
            chunks[part.chunk].give_back(part.rows)


def plan_calls(chunks: list[Undecoded], *, max_bytes: int, max_later: int) -> list[DecodeCall]:
    """Plan the calls that decode the first chunk's images that are left, filled up with images of the others.

    Each has an image of the first chunk.

    Images of the other chunks are taken only if the first chunk has several samplings. If it has one, its calls have
    the same sizes as those of its neighbours, and decoding earlier would gain nothing.

    max_bytes: the largest space of a call; one larger image is alone in its call.
    max_later: the largest number of images of the other chunks. Calls of rare samplings get them first, because these
        would have few images without them.
    """
    own = chunks[0]
    calls: list[DecodeCall] = []
    for sampling in own.samplings_left():
        rows = [own.take(sampling)]
        images, space = len(rows[0]), int(own.spaces[rows[0]].sum())
        full = min(-(-images // CALL_IMAGES) * CALL_IMAGES, images + max_later)
        free = -(-space // max_bytes) * max_bytes
        for other in chunks[1:] if own.mixed else ():
            if images == full:
                break
            rows.append(other.take(sampling, full - images, free - space))
            if len(rows[-1]):
                images, space = images + len(rows[-1]), space + int(other.spaces[rows[-1]].sum())
        for call in _calls(chunks, rows, sampling, max_bytes):
            if call.parts[0].chunk == 0:
                calls.append(call)
                max_later -= len(call) - len(call.parts[0].rows)
            else:  # what was to fill the others up did not fit
                call.give_back(chunks)
    return calls


def _calls(chunks: list[Undecoded], rows: Sequence[Ints], sampling: int, max_bytes: int) -> Iterator[DecodeCall]:
    """Yield the calls that decode these images of each chunk, which have one sampling."""
    used = [number for number, own in enumerate(rows) if len(own)]
    pixels = np.concatenate([chunks[number].pixels[rows[number]] for number in used])
    spaces = np.concatenate([chunks[number].spaces[rows[number]] for number in used])
    numbers, together = np.repeat(used, [len(rows[number]) for number in used]), np.concatenate(rows)
    for order in deal(pixels, spaces, CALL_IMAGES, max_bytes):
        chosen, own = numbers[order], together[order]
        if len(used) == 1:
            parts = [CallPart(used[0], _ALL, own)]
        else:
            places = [(number, np.flatnonzero(chosen == number)) for number in used]
            parts = [CallPart(number, where, own[where]) for number, where in places if len(where)]
        yield DecodeCall(parts, spaces[order], sampling)


def deal(pixels: Ints, spaces: Ints, max_images: int, max_bytes: int) -> Iterator[Ints]:
    """Deal images of these numbers of pixels and spaces [N] to calls of about equally many pixels, none above
    `max_images` or `max_bytes`; an image of a larger space is alone. Each call's images are in descending order of
    pixels."""
    order = np.argsort(-pixels, kind="stable")
    if 0 < len(order) <= max_images and int(spaces.sum()) <= max_bytes:
        yield order
        return
    huge = spaces[order] > max_bytes
    yield from order[huge, None]
    order = order[~huge]
    count = len(order)
    calls = max(-(-count // max_images), -(-int(spaces[order].sum()) // max_bytes))
    while any(spaces[order[i::calls]].sum() > max_bytes for i in range(calls)):
        calls += 1
    yield from (order[i::calls] for i in range(calls))
