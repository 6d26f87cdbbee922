"""Orders that draw samples by weights, or sources of a mix: pure functions of (seed, epoch, position).

Without replacement, and for a mix, one table of the epoch's positions is made when its first index is asked for. It is
made of whole numbers and of sums, products and quotients of IEEE 754, which are the same on every machine.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from gpuflow.arrays import Floats, Ints
from gpuflow.loader.sampler import Order, drawn_candidate
from gpuflow.pipeline.rng import StageKeys, key64, permute

Table = Ints


@final
class WeightedOrder:
    """Samples in proportion to their weights.

    With replacement, each position draws one of all samples. Without, an epoch is a permutation that begins with the
    samples of the smallest e / weight, where e is exponentially distributed and drawn anew for each sample and epoch
    (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006): each next sample is drawn from those
    that are left, in proportion to their weights. A sample of weight 0 never comes, nor does it replace a bad one.

    Args:
        weights: finite numbers >= 0, one for each index, not all of them 0.
        size: samples of an epoch; without replacement at most as many as weights are above 0.
    """

    def __init__(self, weights: Floats, *, size: int, seed: int = 0, replacement: bool = True) -> None:
        self.size, self._seed, self._with_replacement = size, seed, replacement
        self._chosen = np.flatnonzero(weights > 0)
        self._weights = weights[self._chosen] / weights.max()  # so that their sum is finite
        self._sums = np.cumsum(self._weights)
        content = hashlib.blake2b(weights.astype("<f8").tobytes(), digest_size=8).hexdigest()
        self.digest = f"weights {content}, {size} {'with' if replacement else 'without'} replacement"
        self._table = _OneTable(self._race)

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        places = np.array(positions, dtype=np.int64)
        if not self._with_replacement:
            return self._table.of(epoch)[places]
        drawn = _uniform(key64("weights", self._seed), epoch, places.reshape(-1)) * self._sums[-1]
        numbers = np.minimum(np.searchsorted(self._sums, drawn, side="right"), len(self._chosen) - 1)
        found: Ints = self._chosen[numbers].reshape(places.shape)
        return found

    def _race(self, epoch: int) -> Table:
        drawn = _uniform(key64("race", self._seed), epoch, self._chosen)
        times = -_log(1.0 - drawn) / self._weights
        return self._chosen[np.argsort(times, kind="stable")[: self.size]]

    def candidates(self, epoch: int, position: int) -> int:
        return len(self._chosen)

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        return int(self._chosen[drawn_candidate(len(self._chosen), attempt, self._seed, epoch, position)])


@final
class MixedOrder:
    """Several sources in fixed proportions: every epoch has the same number of samples of each.

    A permutation of each epoch decides which source has which position. The samples of a source are in that source's
    own order, which continues from one epoch to the next: its order's epoch 0, then its epoch 1, and so on. So a sample
    is repeated only after all others of its source were delivered the same number of times.

    Args:
        orders: of each source, with indices from 0 on.
        lengths: the number of its indices; those of a source follow those of the sources before it.
        weights: of each source, above 0.
        samples: of an epoch; with `run` above 1 they are filled up to whole runs.
        run: the number of neighbouring positions that one source gets: the batch size, if each batch is of one source.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        lengths: Sequence[int],
        weights: Sequence[float],
        *,
        samples: int,
        seed: int = 0,
        run: int = 1,
    ) -> None:
        self._orders, self._run, self._seed = tuple(orders), run, seed
        self._firsts = (np.cumsum(lengths) - np.asarray(lengths)).tolist()
        self._slots = -(-samples // run)
        self.counts = apportion(weights, self._slots)
        self._ends = np.cumsum(self.counts)
        self.digest = " ".join(f"{i}: {order.digest}" for i, order in enumerate(orders) if order.digest)
        self._table = _OneTable(self._draws)

    @property
    def size(self) -> int:
        return self._slots * self._run

    def _draws(self, epoch: int) -> Table:
        """For each slot the number of its draw. Those of a source are counted after those of the sources before it."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        sources = sources[permute(np.arange(self._slots), self._slots, key64("mix", self._seed, epoch))]
        draws = np.empty(self._slots, np.int64)
        draws[np.argsort(sources, kind="stable")] = np.arange(self._slots)
        return draws

    def _places(self, epoch: int, places: Ints) -> tuple[Ints, Ints]:
        """For each position its source, and how many samples of that come before it in the epoch."""
        draws = self._table.of(epoch)[places // self._run]
        sources = np.searchsorted(self._ends, draws, side="right")
        drawn = draws - (self._ends - np.asarray(self.counts))[sources]
        return sources, drawn * self._run + places % self._run

    def _pass(self, source: int, epoch: int, before: int) -> tuple[int, int]:
        """The epoch and the position of a source's own order after `before` of its samples of this epoch."""
        return divmod(epoch * self.counts[source] * self._run + before, self._orders[source].size)

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        places = np.array(positions, dtype=np.int64)
        sources, before = self._places(epoch, places.reshape(-1))
        found = np.empty(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            mine = np.flatnonzero(sources == source)
            order = self._orders[source]
            first, start = self._pass(source, epoch, 0)
            rounds, own = np.divmod(start + before[mine], order.size)
            for number in np.unique(rounds).tolist():
                now = rounds == number
                found[mine[now]] = self._firsts[source] + order.indices(first + number, own[now])
        return found.reshape(places.shape)

    def candidates(self, epoch: int, position: int) -> int:
        source, own_epoch, place = self._at(epoch, position)
        return self._orders[source].candidates(own_epoch, place)

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        """Another sample of the same source."""
        source, own_epoch, place = self._at(epoch, position)
        return int(self._firsts[source]) + self._orders[source].replacement(own_epoch, place, attempt)

    def _at(self, epoch: int, position: int) -> tuple[int, int, int]:
        sources, before = self._places(epoch, np.array([position]))
        return int(sources[0]), *self._pass(int(sources[0]), epoch, int(before[0]))


@final
class MixInOrder:
    """Several sources, one after the other, each in its own order: that of a mix that is not shuffled.

    Args:
        lengths: the number of samples of each source.
    """

    digest = ""

    def __init__(self, lengths: Sequence[int], *, seed: int = 0) -> None:
        self._ends, self._lengths, self._seed = np.cumsum(lengths).tolist(), tuple(lengths), seed

    @property
    def size(self) -> int:
        return int(self._ends[-1])

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        return np.array(positions, dtype=np.int64)

    def candidates(self, epoch: int, position: int) -> int:
        return self._lengths[bisect_right(self._ends, position)]

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        source = bisect_right(self._ends, position)
        own = drawn_candidate(self._lengths[source], attempt, self._seed, epoch, position)
        return int(self._ends[source] - self._lengths[source] + own)


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to weights, which add up to `total`: none is one or more from its exact share."""
    whole = sum(weights)
    shares = [total * (weight / whole) for weight in weights]
    counts = [min(int(share), total) for share in shares]
    largest_first = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in largest_first[: total - sum(counts)]:
        counts[i] += 1
    return counts


@final
class _OneTable:
    """The table of the epoch that was asked for last. Any thread may ask."""

    def __init__(self, make: Callable[[int], Table]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._last: tuple[int, Table] | None = None

    def of(self, epoch: int) -> Table:
        last = self._last
        if last is not None and last[0] == epoch:
            return last[1]
        with self._lock:
            if self._last is None or self._last[0] != epoch:
                self._last = epoch, self._make(epoch)
            return self._last[1]


def _uniform(key: int, epoch: int, places: Ints) -> Floats:
    """A number in [0, 1) for each place, with 53 random bits."""
    words = StageKeys(key, epoch % 2**64, places).uniform(2)
    return words[:, 0] + np.floor(words[:, 1] * 2.0**21) * 2.0**-53


def _log(values: Floats) -> Floats:
    """The natural logarithm of numbers in (0, 1], at most 0. A library's differs in the last bit between machines.

    log(m * 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1)), by the series of artanh.
    """
    mantissas, exponents = np.frexp(values)
    ratio = (mantissas - 1) / (mantissas + 1)
    square = ratio * ratio
    total = np.zeros_like(ratio)
    for power in range(35, 0, -2):
        total = total * square + 1.0 / power
    logarithms: Floats = np.minimum(exponents * 0.6931471805599453 + 2 * ratio * total, 0.0)
    return logarithms
