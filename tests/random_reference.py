"""Philox and the permutation in numpy, as a reference for the C code of gpuflow/native/rng.c."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["permuted", "philox", "uniform"]

U64 = np.uint64
_LOW32, _SHIFT32 = U64(0xFFFFFFFF), U64(32)
_ROUNDS = 8


def philox(counters: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return four words of 32 bits for each counter of four words, [4, n]: Philox4x32-10."""
    a, b, c, d = (word.copy() for word in counters)
    first, second = U64(key & 0xFFFFFFFF), U64(key >> 32)
    for _ in range(10):
        of_a, of_c = a * U64(0xD2511F53), c * U64(0xCD9E8D57)
        a, b, c, d = of_c >> _SHIFT32 ^ b ^ first, of_c & _LOW32, of_a >> _SHIFT32 ^ d ^ second, of_a & _LOW32
        first, second = first + U64(0x9E3779B9) & _LOW32, second + U64(0xBB67AE85) & _LOW32
    return np.stack([a, b, c, d])


def uniform(positions: NDArray[np.int64], count: int, epoch: int, key: int) -> NDArray[np.float64]:
    """Return the first `count` numbers of each sample, [n, count]."""
    blocks = -(-count // 4)
    place = positions.astype(U64)[:, None]
    counters = np.empty((4, len(place), blocks), U64)
    counters[0], counters[1], counters[2] = place & _LOW32, place >> _SHIFT32, epoch
    counters[3] = np.arange(blocks, dtype=U64)
    words = philox(counters.reshape(4, -1), key)
    numbers = np.multiply(words.T.reshape(len(place), 4 * blocks), 2.0**-32, dtype=np.float64)
    return numbers[:, :count]


def permuted(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return the positions after the permutation of range(size) that `key` selects: a Feistel network in Python."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        return x ^ x >> 31

    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    keys = [mix((turn * 0x9E3779B97F4A7C15 + key) % 2**64) for turn in range(1, _ROUNDS + 1)]
    found = []
    for value in positions.tolist():
        while True:
            left, right = divmod(value, b)
            for turn in range(0, _ROUNDS, 2):
                left = (left + mix(right ^ keys[turn]) % a) % a
                right = (right + mix(left ^ keys[turn + 1]) % b) % b
            value = left * b + right
            if value < size:
                break
        found.append(value)
    return np.array(found, np.int64)
