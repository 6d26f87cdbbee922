"""Random numbers, keys and permutations as pure functions of counters, equal in every process.

The numbers are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The permutation is an alternating unbalanced Feistel network over the mixed radix a*b >= n, with cycle walking (Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Its round function is the finaliser of SplitMix64
(Steele, Lea and Flood, OOPSLA 2014). One position takes the same time among 10 samples as among 10^12.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuflow.errors import show
from gpuflow.pipeline.record_values import RecordValue
from gpuflow.runtime.compiled import compiled

__all__ = ["Keys", "StageKeys", "epoch_number", "key64", "permute"]

T = TypeVar("T")


def epoch_number(epoch: object, bits: int) -> int:
    """An epoch as an `int`, also where it is an integer of numpy or a tensor. Raises ValueError unless it is an integer
    from 0 to 2**bits - 1."""
    try:
        number = operator.index(epoch)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << bits:
        raise ValueError(f"epoch must be an integer within [0, 2**{bits}), got {show(epoch)}")
    return number


_POINTER, _INTEGER, _WORD = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
_ROUNDS = 8
"""Of the permutation, as in rng.c."""
_MANY_SAMPLES = 128
"""The smallest number of samples for which C code draws. The CPU decodes smaller chunks: numpy is fast enough there."""
_MOST_PERMUTED = 1 << 14
"""The largest number of positions that C code permutes, in about a millisecond: it does not release the interpreter
lock, and numpy does."""

_U64 = np.uint64


def key64(*parts: object) -> int:
    """A 64-bit key from any printable parts, the same in every process (BLAKE2b)."""
    text = "\x1f".join(str(part) for part in parts)
    data = text.encode("utf-8", "surrogatepass")  # names of files that are not UTF-8 hold surrogates
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, elementwise, modulo 2^64."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def permute(positions: ArrayLike, size: int, key: int) -> NDArray[np.int64]:
    """Map positions in range(size) by the permutation that `key` selects.

    Args:
        positions: int64 array of any shape, each in [0, size).
        size: number of elements, 1 to 2^62.
        key: 64-bit key; each key selects another permutation.

    Returns:
        int64 array of the same shape: distinct positions give distinct values in [0, size).
    """
    x = np.array(positions, dtype=np.uint64)
    shape, x = x.shape, x.reshape(-1)
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    if _MANY_SAMPLES <= len(x) <= _MOST_PERMUTED and (permute_in_c := _permute_in_c()) is not None:
        permute_in_c(x.ctypes.data, len(x), size, left_size, right_size, key)
        return x.astype(np.int64).reshape(shape)
    a, b, n = _U64(left_size), _U64(right_size), _U64(size)
    round_keys = _mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _U64(0x9E3779B97F4A7C15) + _U64(key))

    def network(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values // b, values % b
        for turn in range(0, _ROUNDS, 2):
            left = (left + _mix(right ^ round_keys[turn]) % a) % a
            right = (right + _mix(left ^ round_keys[turn + 1]) % b) % b
        return left * b + right

    with np.errstate(over="ignore"):
        x = network(x)
        while (outside := x >= n).any():
            x[outside] = network(x[outside])
    return x.astype(np.int64).reshape(shape)


_LOW32, _SHIFT32 = _U64(0xFFFFFFFF), _U64(32)
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], np.uint64)
"""Of Philox, for the third and the first word."""
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
"""What each round of Philox adds to the two halves of the key, modulo 2^32."""


def _philox(counters: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        counters: [4, n], of 32 bits each.
        key: 64 bits.

    Returns:
        Four words of 32 bits for each counter, [4, n].
    """
    even, odd = counters[0::2].copy(), counters[1::2].copy()  # two words at a time, in place: half the calls of numpy
    products, crossed = np.empty_like(even), even[::-1]
    keys = (_KEY_STEPS + np.array([key & 0xFFFFFFFF, key >> 32], np.uint64)) & _LOW32
    for round_key in keys[:, :, None]:
        np.multiply(crossed, _MULTIPLIERS, out=products)
        np.right_shift(products, _SHIFT32, out=even)
        even ^= odd
        even ^= round_key
        np.bitwise_and(products, _LOW32, out=odd)
    words = np.empty_like(counters)
    words[0::2], words[1::2] = even, odd
    return words


@lru_cache
def _numbers_in_c() -> Callable[..., None] | None:
    """`gpuflow_random_numbers` of rng.c; None without a compiler."""
    return _in_c("gpuflow_random_numbers", _POINTER, _INTEGER, _INTEGER, _WORD, _WORD, _INTEGER, _POINTER)


@lru_cache
def _permute_in_c() -> Callable[..., None] | None:
    """`gpuflow_permute` of rng.c; None without a compiler."""
    return _in_c("gpuflow_permute", _POINTER, _INTEGER, _WORD, _WORD, _WORD, _WORD)


def _in_c(name: str, *types: Any) -> Callable[..., None] | None:
    """A function of rng.c, which does not release the interpreter lock, because a call takes microseconds."""
    code = compiled(Path(__file__).with_suffix(".c"))
    if code is None:
        return None
    return ctypes.PYFUNCTYPE(None, *types)(ctypes.cast(getattr(code, name), _POINTER).value or 0)


@dataclass(frozen=True, slots=True)
class StageKeys:
    """The random numbers of one stage for N samples, a pure function of (seed, epoch, position, stage).

    key: 64 bits from the seed and the stage's name and occurrence. epoch, positions [N]: the counter.
    values [N, ...]: what the stage takes from the samples' records.
    """

    key: int
    epoch: int
    positions: NDArray[np.int64]
    values: Mapping[RecordValue, NDArray[np.float64]] = field(default_factory=dict)
    _drawn: list[NDArray[np.float64]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The numbers drawn so far, [N, M]; empty before the first draw. A stage that draws in parts asks for some of them
    again."""
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `once` has made, by its name."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        """`count` numbers per sample, in [0, 1) with 32 random bits each: float64 [N, count].

        They are the first ones of the same sequence in every call.
        """
        if not self._drawn or self._drawn[0].shape[1] < count:
            self._drawn[:] = [self._draw(-(-count // 4))]
        return self._drawn[0][:, :count].copy()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, which is called only if nothing of this name was made for these samples yet."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def _draw(self, blocks: int) -> NDArray[np.float64]:
        """The first numbers of each sample, four in a block, [N, 4 * blocks]."""
        count = len(self.positions)
        if count >= _MANY_SAMPLES and (numbers_in_c := _numbers_in_c()) is not None:
            positions, found = np.ascontiguousarray(self.positions, np.int64), np.empty((count, 4 * blocks))
            numbers_in_c(positions.ctypes.data, count, blocks, self.epoch, self.key, 1, found.ctypes.data)
            return found
        place = self.positions.astype(np.uint64)[:, None]
        counters = np.empty((4, len(place), blocks), np.uint64)
        counters[0], counters[1], counters[2] = place & _LOW32, place >> _SHIFT32, self.epoch
        counters[3] = np.arange(blocks, dtype=np.uint64)
        words = _philox(counters.reshape(4, -1), self.key)
        return np.multiply(words.T.reshape(len(place), 4 * blocks), 2.0**-32, dtype=np.float64)


@lru_cache(maxsize=1024)
def _key_of_stage(seed: int, name: str, occurrence: int, view: tuple[str, int] | tuple[()]) -> int:
    """The key of a stage's numbers, which each batch asks for."""
    return key64("stage", seed, name, occurrence, *view)


@dataclass(frozen=True, slots=True)
class Keys:
    """The random keys of N samples: seed, epoch and positions [N]. Each stage has its own, by name and occurrence.

    view: the name and the number of the view that the stages belong to; empty without views.
    values [N, ...]: what the stages take from the samples' records; empty for most pipelines.
    """

    seed: int
    epoch: int
    positions: NDArray[np.int64]
    view: tuple[str, int] | tuple[()] = ()
    values: Mapping[RecordValue, NDArray[np.float64]] = field(default_factory=dict)
    _stages: dict[tuple[str, int], StageKeys] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stage(self, name: str, occurrence: int) -> StageKeys:
        """The keys of one stage: the same object in every call, which remembers what was drawn."""
        known = self._stages.get((name, occurrence))
        if known is None:
            key = _key_of_stage(self.seed, name, occurrence, self.view)
            known = self._stages[name, occurrence] = StageKeys(key, self.epoch, self.positions, self.values)
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was drawn, which another process draws again."""
        return Keys, (self.seed, self.epoch, self.positions, self.view, self.values)

    def of_view(self, name: str, number: int) -> Keys:
        """The keys of the same samples for one view."""
        return dataclasses.replace(self, view=(name, number))

    def take(self, rows: NDArray[np.int64] | slice) -> Keys:
        """The keys of some of the samples."""
        values = {value: numbers[rows] for value, numbers in self.values.items()}
        return Keys(self.seed, self.epoch, self.positions[rows], self.view, values)

    def __getitem__(self, i: int) -> Keys:
        """The keys of sample i only (N = 1)."""
        return self.take(slice(i, i + 1))
