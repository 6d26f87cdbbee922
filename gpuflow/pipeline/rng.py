"""Random numbers, keys and permutations as pure functions of counters, equal in every process.

The numbers are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The permutation is an alternating unbalanced Feistel network over the mixed radix a*b >= n, with cycle walking (Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Its round function is the finaliser of SplitMix64
(Steele, Lea and Flood, OOPSLA 2014). One position takes the same time among 10 samples as among 10^12.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from gpuflow.arrays import Floats, Ints
from gpuflow.errors import show
from gpuflow.native.library import INTEGER, POINTER, WORD, function
from gpuflow.pipeline.records import RecordValue

T = TypeVar("T")


def epoch_number(epoch: object, bits: int) -> int:
    """Return an epoch as an `int`, also where it is an integer of numpy or a tensor.

    Raises ValueError unless it is an integer from 0 to 2**bits - 1.

    Examples:
        >>> epoch_number(np.int64(3), 32)
        3
    """
    try:
        number = operator.index(epoch)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << bits:
        raise ValueError(f"epoch must be an integer within [0, 2**{bits}), got {show(epoch)}")
    return number


_SHORT_CALL = 1 << 12
"""The most numbers or positions for which a call keeps the interpreter: it takes at most a quarter of a millisecond."""


def _function(name: str, *parameters: Any) -> Callable[..., None]:
    """Return a function of rng.c, to be called with the number of values and its arguments."""
    short, long = (function(name, *parameters, holds_interpreter=held) for held in (True, False))
    return lambda values, *arguments: (short if values <= _SHORT_CALL else long)(*arguments)


_random_numbers = _function("gpuflow_random_numbers", POINTER, INTEGER, INTEGER, WORD, WORD, POINTER)
_permute = _function("gpuflow_permute", POINTER, INTEGER, WORD, WORD, WORD, WORD)


def key64(*parts: object) -> int:
    """Hash any printable parts to a 64-bit key, which is the same in every process (BLAKE2b).

    Examples:
        >>> key64("train", 3) == key64("train", 3), key64("train", 3) == key64("train", 4)
        (True, False)
    """
    text = "\x1f".join(str(part) for part in parts)
    data = text.encode("utf-8", "surrogatepass")  # names of files that are not UTF-8 hold surrogates
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def permute(positions: ArrayLike, size: int, key: int) -> Ints:
    """Map positions in range(size) by the permutation that `key` selects.

    Args:
        positions: int64 array of any shape, each in [0, size).
        size: number of elements, 1 to 2^62.
        key: 64-bit key; each key selects another permutation.

    Returns:
        int64 array of the same shape: distinct positions give distinct values in [0, size).

    Examples:
        >>> permute([0, 1, 2, 3, 4], 5, key=7).tolist()
        [2, 0, 3, 4, 1]
    """
    x = np.array(positions, dtype=np.uint64)
    shape = x.shape
    x = x.reshape(-1)
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    _permute(len(x), x.ctypes.data, len(x), size, left_size, right_size, key)
    return x.astype(np.int64).reshape(shape)


@dataclass(frozen=True, slots=True)
class StageKeys:
    """The random numbers of one stage for N samples, a pure function of (seed, epoch, position, stage).

    key: 64 bits from the seed and the stage's name and occurrence. epoch, positions [N]: the counter.
    values [N, ...]: what the stage takes from the samples' records.
    """

    key: int
    epoch: int
    positions: Ints
    values: Mapping[RecordValue, Floats] = field(default_factory=dict)
    _drawn: list[Floats] = field(default_factory=list, init=False, repr=False, compare=False)
    """The numbers drawn so far, [N, M]; empty before the first draw. A stage that draws in parts asks for some of them
    again."""
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `once` has made, by its name."""

    def uniform(self, count: int) -> Floats:
        """Draw `count` numbers per sample, in [0, 1) with 32 random bits each: float64 [N, count].

        They are the first ones of the same sequence in every call.
        """
        if not self._drawn or self._drawn[0].shape[1] < count:
            self._drawn[:] = [self._draw(-(-count // 4))]
        return self._drawn[0][:, :count].copy()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for these samples under this name. It is called at the first use."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def _draw(self, blocks: int) -> Floats:
        """Draw the first numbers of each sample, four in a block, [N, 4 * blocks]."""
        positions = np.ascontiguousarray(self.positions, np.int64)
        numbers = np.empty((len(positions), 4 * blocks))
        shape = len(positions), blocks
        _random_numbers(numbers.size, positions.ctypes.data, *shape, self.epoch, self.key, numbers.ctypes.data)
        return numbers


@lru_cache(maxsize=1024)
def _key_of_stage(seed: int, name: str, occurrence: int, view: tuple[str, int] | tuple[()]) -> int:
    """Return the key of a stage's numbers. Each batch asks for it, so it is cached."""
    return key64("stage", seed, name, occurrence, *view)


@dataclass(frozen=True, slots=True)
class Keys:
    """The random keys of N samples: seed, epoch and positions [N]. Each stage has its own, by name and occurrence.

    view: the name and the number of the view that the stages belong to; empty without views.
    values [N, ...]: what the stages take from the samples' records; empty for most pipelines.

    Examples:
        >>> keys = Keys(seed=0, epoch=2, positions=np.arange(8))
        >>> numbers = keys.stage("flip", 0).uniform(2)
        >>> numbers.shape, bool((keys[5].stage("flip", 0).uniform(2) == numbers[5]).all())
        ((8, 2), True)
    """

    seed: int
    epoch: int
    positions: Ints
    view: tuple[str, int] | tuple[()] = ()
    values: Mapping[RecordValue, Floats] = field(default_factory=dict)
    _stages: dict[tuple[str, int], StageKeys] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stage(self, name: str, occurrence: int) -> StageKeys:
        """Return the keys of one stage. Every call returns the same object, which remembers what was drawn."""
        known = self._stages.get((name, occurrence))
        if known is None:
            key = _key_of_stage(self.seed, name, occurrence, self.view)
            known = self._stages[name, occurrence] = StageKeys(key, self.epoch, self.positions, self.values)
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what was drawn, which another process draws again."""
        return Keys, (self.seed, self.epoch, self.positions, self.view, self.values)

    def of_view(self, name: str, number: int) -> Keys:
        """Return the keys of the same samples for one view."""
        return dataclasses.replace(self, view=(name, number))

    def take(self, rows: Ints | slice) -> Keys:
        """Return the keys of some of the samples."""
        values = {value: numbers[rows] for value, numbers in self.values.items()}
        return dataclasses.replace(self, positions=self.positions[rows], values=values)

    def __getitem__(self, i: int) -> Keys:
        """Return the keys of sample i only (N = 1)."""
        return self.take(slice(i, i + 1))
