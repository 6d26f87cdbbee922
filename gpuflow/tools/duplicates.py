"""Equal and similar images of a source: in two of its parts, where they falsify a validation, and within one part.

Equal means equal bytes. Similar images are found by a perceptual hash, pHash: which of 64 low frequencies of the
image's discrete cosine transform are above their median (C. Zauner, Implementation and Benchmarking of Perceptual Image
Hash Functions, 2010, section 3.2.1). The hashes of an image that is mirrored or rotated follow from the same
frequencies. Two images are similar if few bits differ and the frequencies correlate, which those of smooth images
seldom do by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Array, Bools, Bytes, Floats, Ints
from gpuflow.sources import Division, MixSource, Source, is_read_remotely
from gpuflow.sources.record_table import Members

Hashes = NDArray[np.uint64]

_SIDE, _FREQUENCIES, _TURNS = 32, 9, 8
_MIN_CORRELATION = 0.95
_MIN_DETAIL = 2.0
"""The least root mean square, in levels, of the hashed frequencies: those of smoother images are noise."""
_BATCH = 1 << 18
"""The number of pairs that are compared at once, at least."""
_TAIL_BYTES = 4096
_CHUNK = 256
_SIZE, _TAIL, _WHOLE = range(3)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples with equal bytes, or similar images.

    index: the sample of the later part; within a part, that of the higher index. other: the other sample.
    bits: how many of 64 bits of the hashes differ; None for equal bytes. turned: one is mirrored or rotated.
    """

    index: int
    other: int
    bits: int | None = None
    turned: bool = False

    def describe(self, source: Source, division: Division) -> str:
        """Say what the sample has in common with the other one."""
        other = f"{division.describe(self.other)}, {source.path(self.other)}"
        if self.bits is None:
            return f"has the bytes of {other}"
        return f"looks like {other}: {self.bits} of 64 bits differ{', mirrored or rotated' * self.turned}"


# --- contents ---------------------------------------------------------------------------------------------------------


class Contents:
    """What is kept of each sample to compare it. Several threads may add samples.

    digests: uint64 [n], a hash of the bytes; 0 if they are not known.
    hashes: uint64 [n, 8], the perceptual hashes of the image and of its mirrored and rotated forms.
    frequencies: float16 [n, 9, 9] of length 1; zeros for an image that is not known, or too smooth to be compared.

    Examples:
        >>> contents = Contents(1)
        >>> contents.add(0, np.zeros(9, np.uint8), np.zeros((40, 50, 3), np.uint8))
        >>> bool(contents.digests[0]), contents.frequencies.any()
        (True, np.False_)
    """

    def __init__(self, count: int) -> None:
        self.digests = np.zeros(count, np.uint64)
        self.hashes = np.zeros((count, _TURNS), np.uint64)
        self.frequencies = np.zeros((count, _FREQUENCIES, _FREQUENCIES), np.float16)

    def add(self, index: int, data: Bytes, image: Bytes | None, color: str = "rgb") -> None:
        """Keep a sample. image: uint8 HWC in `color`; None if it cannot be decoded."""
        self.digests[index] = _digest(len(data), data)
        if image is None:
            return
        small = cv2.resize(image, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA).reshape(_SIDE, _SIDE, -1)
        frequencies: Floats = _COSINES @ (small @ _LUMA[color]) @ _COSINES.T
        frequencies[0, 0] = 0
        if np.linalg.norm(frequencies[1:, 1:]) < _MIN_DETAIL * _SIDE:
            return
        turned = np.stack([_turned(frequencies, turn)[1:, 1:].ravel() for turn in range(_TURNS)])
        bits = turned > np.median(turned, axis=1, keepdims=True)
        self.hashes[index] = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
        self.frequencies[index] = frequencies / np.linalg.norm(frequencies)


def _digest(size: int, data: Bytes) -> int:
    """Hash the size and the bytes of a file, or its last ones. Returns 0 for those of a file that cannot be read."""
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=8, key=size.to_bytes(8)).digest()) if size else 0


_LUMA = {"rgb": np.array([0.299, 0.587, 0.114]), "bgr": np.array([0.114, 0.587, 0.299]), "gray": np.ones(1)}
_COSINES = np.cos(np.pi * np.outer(np.arange(_FREQUENCIES), np.arange(_SIDE) + 0.5) / _SIDE)
_COSINES *= np.where(np.arange(_FREQUENCIES) == 0, np.sqrt(1 / _SIDE), np.sqrt(2 / _SIDE))[:, None]
"""The first rows of the orthonormal matrix of the discrete cosine transform, DCT-II."""
_SIGNS = (-1.0) ** np.arange(_FREQUENCIES)
"""Mirroring an image changes the signs of its odd frequencies."""


def _turned(frequencies: Array, turn: int) -> Array:
    """Return the frequencies [..., 9, 9] of mirrored or rotated images. turn: 0 to 7; 0 leaves them as they are."""
    mirrored = frequencies * (_SIGNS[:, None] ** (turn >> 1 & 1) * _SIGNS ** (turn & 1))
    return np.swapaxes(mirrored, -1, -2) if turn & 4 else mirrored


# --- comparison -------------------------------------------------------------------------------------------------------


def equal_pairs(digests: Hashes, division: Division) -> tuple[list[Pair], int]:
    """Find samples with equal bytes.

    Returns:
        Each sample whose bytes an earlier part has, with the first sample there; and the number of samples that repeat
        one of their own part.
    """
    order = np.lexsort((division.parts, digests))
    order = order[(digests[order] != 0) & (division.parts[order] >= 0)]
    _, first, group = np.unique(digests[order], return_index=True, return_inverse=True)
    leaders, own = order[first][group], division.parts[order]
    leaks = np.flatnonzero(own != division.parts[leaders])
    repeated = (np.diff(group) == 0) & (np.diff(own) == 0)
    pairs = sorted(zip(order[leaks].tolist(), leaders[leaks].tolist(), strict=True))
    return [Pair(*pair) for pair in pairs], int(repeated.sum())


def near_pairs(contents: Contents, division: Division, max_bits: int) -> tuple[list[Pair], list[Pair]]:
    """Find similar images, those with equal bytes, too.

    Returns:
        Each sample that is similar to one of an earlier part, with the most similar one; and the same for samples that
        are similar to one of a lower index in their own part.
    """
    samples = np.flatnonzero(contents.frequencies.any(axis=(1, 2)) & (division.parts >= 0))
    keys = np.stack([division.parts[samples].astype(np.uint64), contents.hashes[samples, 0]])
    _, first, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    group = group.ravel()  # numpy 2.0 gives it two dimensions
    best = _nearest(contents, division, samples[first], max_bits)[:, group]
    repeats = samples != samples[first][group]
    best[1, repeats] = samples[first][group][repeats]
    across, within = (
        [
            Pair(index, key & _INDEX, key >> 41, bool(key & _INDEX + 1))
            for index, key in zip(samples.tolist(), row.tolist(), strict=True)
            if key != _NOTHING
        ]
        for row in best
    )
    return across, within


_NOTHING = np.iinfo(np.int64).max
_INDEX = (1 << 40) - 1


def _nearest(contents: Contents, division: Division, samples: Ints, max_bits: int) -> Ints:
    """Return for each sample a key of the most similar one in an earlier part, and in its own part: int64 [2, n].

    A key has the number of bits that differ, whether one image is turned, and the other sample, highest bits first.
    """
    hashes, own = contents.hashes[samples], division.parts[samples]
    best = np.full((2, len(samples)), _NOTHING, np.int64)
    for a, b, turn in _candidates(hashes, max_bits):
        turned = _turned(contents.frequencies[samples[a]].astype(np.float32), turn)
        similar = (turned * contents.frequencies[samples[b]]).sum(axis=(1, 2)) >= _MIN_CORRELATION
        a, b = a[similar], b[similar]
        late = np.where(own[a] == own[b], samples[a] > samples[b], own[a] > own[b])
        bits = np.bitwise_count(hashes[a, turn] ^ hashes[b, 0]).astype(np.int64)
        keys = (bits << 1 | (turn > 0)) << 40 | samples[np.where(late, b, a)]
        np.minimum.at(best, ((own[a] == own[b]).astype(np.int64), np.where(late, a, b)), keys)
    return best


def _candidates(hashes: Hashes, max_bits: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield rows a and b and a turn, so that at most `max_bits` bits differ between the turned image a and image b.

    Hashes of which at most `max_bits` bits differ agree in two of `max_bits` + 2 groups of bits. Only those that agree
    in a pair of groups are compared, so the time grows with the number of images and of similar ones.
    """
    groups = [sum(1 << bit for bit in range(first, 64, max_bits + 2)) for first in range(max_bits + 2)]
    for mask in (np.uint64(one | other) for one, other in combinations(groups, 2)):
        order = np.argsort(hashes[:, 0] & mask)
        keys = hashes[order, 0] & mask
        for turn in range(_TURNS):
            first, last = (np.searchsorted(keys, hashes[:, turn] & mask, side) for side in ("left", "right"))
            ends = np.cumsum(last - first)
            cuts = np.searchsorted(ends, np.arange(_BATCH, ends[-1:].sum(), _BATCH))
            for rows in np.split(np.arange(len(hashes)), cuts):
                counts = (last - first)[rows]
                a = np.repeat(rows, counts)
                b = order[np.arange(len(a)) + np.repeat(last[rows] - np.cumsum(counts), counts)]
                near = (np.bitwise_count(hashes[a, turn] ^ hashes[b, 0]) <= max_bits) & (a != b)
                yield a[near], b[near], turn


# --- leaks, without decoding ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaks:
    """The result of `find_leaks`.

    pairs: samples whose bytes an earlier part has. unread: how many samples could not be read.
    skipped: how many samples behind URLs were not compared, because of the limit.
    """

    pairs: list[Pair]
    unread: int
    skipped: int


def find_leaks(
    source: Source,
    division: Division,
    *,
    max_requests: int,
    progress: Callable[..., object] = lambda **numbers: None,
) -> Leaks:
    """Find equal bytes in two parts, reading as little as possible: sizes, then the ends of files of equal size, then
    the files whose ends are equal.

    Args:
        max_requests: the most samples behind URLs for which servers are asked in each of the three steps.
        progress: called with the numbers of samples that are `completed` in a step, and in `total`.
    """
    keys = np.ones(len(source), np.uint64)
    unread = skipped = 0
    sources = list(source.parts) if isinstance(source, MixSource) else [source]
    firsts = np.cumsum([0, *map(len, sources)]).tolist()
    for step in (_SIZE, _TAIL, _WHOLE):
        shared = np.flatnonzero(_in_two_parts(keys, division))
        known = np.zeros(len(source), np.uint64)
        asked = done = 0
        for one, (first, end) in zip(sources, pairwise(firsts), strict=True):
            own = shared[(shared >= first) & (shared < end)]
            if is_read_remotely(one) and not (step == _SIZE and isinstance(getattr(one, "files", None), Members)):
                order = np.lexsort((np.random.default_rng(0).permutation(len(own)), keys[own]))
                skipped += max(0, asked + len(own) - max_requests)
                own = np.sort(own[order][: max_requests - asked])  # those of equal keys together
                asked += len(own)
            for chunk in np.split(own, range(_CHUNK, len(own), _CHUNK)):
                known[chunk] = _keys(one, (chunk - first).tolist(), step)
                done += len(chunk)
                progress(completed=done, total=len(shared))
            unread += int(np.count_nonzero(known[own] == 0))
        keys = known
    return Leaks(equal_pairs(keys, division)[0], unread, skipped)


def _in_two_parts(keys: Hashes, division: Division) -> Bools:
    """Mark the samples whose key another part has, too. A key of 0 is not known."""
    known = (keys != 0) & (division.parts >= 0)
    _, group = np.unique(keys[known], return_inverse=True)
    in_parts = np.bincount(np.unique(np.stack([group, division.parts[known]]), axis=1)[0])
    known[known] = in_parts[group] > 1
    return np.asarray(known)


def _keys(source: Source, samples: list[int], step: int) -> list[int]:
    """Return numbers that are equal for equal sizes, ends or bytes; 0 for a sample that cannot be read."""
    files: Any = getattr(source, "files", None)
    if step == _WHOLE or not hasattr(files, "ranges"):  # less than a sample cannot be read
        payload = source.read(samples, _allocate)
        sizes = list(payload.sizes)
    else:
        ranges = files.ranges(samples)
        sizes = [size for _, _, size in ranges]
        if step == _SIZE:
            return sizes
        tails = [min(size, _TAIL_BYTES) for size in sizes]
        starts = [start + size - tail for (_, start, size), tail in zip(ranges, tails, strict=True)]
        payload = files.storage.read_ranges([shard for shard, _, _ in ranges], starts, tails, _allocate)
    if step == _SIZE:
        return sizes
    data = (payload.sample(i)[-_TAIL_BYTES if step == _TAIL else 0 :] for i in range(len(samples)))
    return [_digest(size if len(one) else 0, one) for size, one in zip(sizes, data, strict=True)]


def _allocate(size: int) -> Bytes:
    return np.empty(size, np.uint8)
