"""Computes which sample is at which position: a pure function of (seed, epoch, position), without a list in memory.

A *position* is a sample's place in the epoch's global sequence. The sequence is a permutation of the source's indices
that does not depend on the number of ranks: rank r of W takes positions [(kW+r)B, (kW+r+1)B) at step k.

`gpuflow.pipeline.rng.permute` computes the permutation: one position takes the same time among 10 samples as among
10^12. Orders that draw by weights or from a mix make a table of an epoch when its first index is asked for. They
compute it from integers and from sums, products and quotients of IEEE 754, which are the same on every machine.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, final

import numpy as np
from numpy.typing import ArrayLike

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.errors import LoaderError
from gpuflow.pipeline.rng import StageKeys, key64, permute


class Order(Protocol):
    """Computes which index of the source stands at a position of an epoch."""

    @property
    def size(self) -> int:
        """Return the number of samples in an epoch."""

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        """Return the source's indices at these positions (each in [0, size)), as int64 of the same shape."""

    def candidates(self, epoch: int, position: int) -> int:
        """Return how many indices may stand in for a bad sample at a position, that sample's own included."""

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        """Return the index that stands in for a bad sample: attempts 0..candidates-1 run through every such index
        once."""

    @property
    def digest(self) -> str:
        """Return a hash of the numbers that it draws by, such as weights; empty for an order without any."""


def drawn_candidate(candidates: int, attempt: int, *key: object) -> int:
    """Return which of the indices that may stand in for a bad sample an attempt takes. key: what the draw depends
    on."""
    return int(permute([attempt], candidates, key64("replace", *key))[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffledOrder:
    """Orders the whole source in one permutation an epoch. If `shuffle` is false, it keeps the source's order.

    Examples:
        >>> order = ShuffledOrder(size=5, seed=1)
        >>> sorted(order.indices(0, range(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    digest = ""
    size: int
    seed: int = 0
    shuffle: bool = True

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        if not self.shuffle:
            return np.array(positions, dtype=np.int64)
        return permute(positions, self.size, key64("order", self.seed, epoch))

    def candidates(self, epoch: int, position: int) -> int:
        return self.size

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        return drawn_candidate(self.size, attempt, self.seed, epoch, position)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedOrder:
    """Orders shards by a permutation, then permutes inside fixed windows of their concatenation.

    Consecutive positions stay within a few shards, so that reading them is close to sequential, and a sample can still
    land anywhere within its window.

    Args:
        shard_sizes: samples in each shard, in the source's order.
        window: positions that are permuted among each other.

    Examples:
        >>> order = ShardedOrder(shard_sizes=(3, 2), window=2)
        >>> sorted(order.indices(0, range(order.size)).tolist())
        [0, 1, 2, 3, 4]
    """

    digest = ""
    shard_sizes: tuple[int, ...]
    seed: int = 0
    window: int = 8192

    @property
    def size(self) -> int:
        return sum(self.shard_sizes)

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        places = np.array(positions, dtype=np.int64)
        shape, places = places.shape, places.reshape(-1)
        starts = places // self.window * self.window
        for start in np.unique(starts):
            inside = starts == start
            length = min(self.window, self.size - int(start))
            key = key64("window", self.seed, epoch, int(start))
            places[inside] = start + permute(places[inside] - start, length, key)
        sizes = np.array(self.shard_sizes, dtype=np.int64)
        shards = permute(np.arange(len(sizes)), len(sizes), key64("shards", self.seed, epoch))
        ends = np.cumsum(sizes[shards])
        turn = np.searchsorted(ends, places, side="right")
        first_index = np.cumsum(sizes) - sizes
        first_place = ends - sizes[shards]
        return (first_index[shards[turn]] + places - first_place[turn]).reshape(shape)

    def candidates(self, epoch: int, position: int) -> int:
        return self.size

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        return drawn_candidate(self.size, attempt, self.seed, epoch, position)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Divides an epoch of `size` positions into steps over ranks.

    The epoch starts at position `start` (0, or where a restored state left off). All ranks make the same number of
    steps. Without `drop_last` the last step is short on a single rank; on several ranks it is filled by wrapping
    around to the epoch's first positions, and what is wrapped is not valid.

    Args:
        size: samples in the epoch.
        batch_size: samples a rank takes in a step.
        rank, world_size: this rank and how many there are.
        drop_last: leave out the last step where it cannot be filled.
        start: first position of the epoch that is still to come.

    Examples:
        >>> steps = Steps(size=10, batch_size=4, rank=1, world_size=2)
        >>> positions, valid = steps.positions(1)  # of rank 1, wrapped around to fill the last step
        >>> len(steps), positions.tolist(), valid.tolist()
        (2, [2, 3, 4, 5], [False, False, False, False])
    """

    size: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    start: int = 0

    @property
    def stride(self) -> int:
        """Return the number of positions that all ranks together take in a step."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        left = max(self.size - self.start, 0)
        return left // self.stride if self.drop_last else -(-left // self.stride)

    def left(self, start: int) -> int:
        """Return how many steps an epoch has from position `start` on."""
        return len(replace(self, start=start))

    def begin(self, epoch: int, start: int) -> Steps:
        """Return the steps of an epoch from position `start` on."""
        return replace(self, start=start)

    def reached(self, step: int) -> int:
        """Return the first position that is still to come after `step` steps."""
        return self.start + step * self.stride

    def positions(self, step: int) -> tuple[Ints, Bools]:
        """Return the positions of this rank's batch at `step`, and which of them are valid (not wrapped)."""
        first = self.start + step * self.stride + self.rank * self.batch_size
        places = np.arange(first, first + self.batch_size, dtype=np.int64)
        if self.world_size == 1:
            places = places[places < self.size]
        return places % self.size, places < self.size


@final
class WeightedOrder:
    """Draws samples in proportion to their weights.

    With replacement, each position draws one of all samples. Without, an epoch is a permutation that begins with the
    samples of the smallest e / weight, where e is exponentially distributed and drawn anew for each sample and epoch
    (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006): each next sample is drawn from those
    that are left, in proportion to their weights. A sample of weight 0 never comes, nor does it replace a bad one.

    Args:
        weights: finite numbers >= 0, one for each index, not all of them 0.
        size: samples of an epoch; without replacement at most as many as weights are above 0.

    Examples:
        >>> order = WeightedOrder(np.array([0.0, 3.0, 0.0, 1.0]), size=2, replacement=False)
        >>> sorted(order.indices(0, range(2)).tolist())
        [1, 3]
    """

    def __init__(self, weights: Floats, *, size: int, seed: int = 0, replacement: bool = True) -> None:
        self.size, self._seed, self._with_replacement = size, seed, replacement
        self._chosen = np.flatnonzero(weights > 0)
        self._weights = weights[self._chosen] / weights.max()  # so that their sum is finite
        self._sums = np.cumsum(self._weights)
        content = hashlib.blake2b(weights.astype("<f8").tobytes(), digest_size=8).hexdigest()
        self.digest = f"weights {content}, {size} {'with' if replacement else 'without'} replacement"
        self._table = lru_cache(maxsize=1)(self._race)

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        places = np.array(positions, dtype=np.int64)
        if not self._with_replacement:
            return self._table(epoch)[places]
        drawn = _uniform(key64("weights", self._seed), epoch, places.reshape(-1)) * self._sums[-1]
        numbers = np.minimum(np.searchsorted(self._sums, drawn, side="right"), len(self._chosen) - 1)
        found: Ints = self._chosen[numbers].reshape(places.shape)
        return found

    def _race(self, epoch: int) -> Ints:
        drawn = _uniform(key64("race", self._seed), epoch, self._chosen)
        times = -_log(1.0 - drawn) / self._weights
        return self._chosen[np.argsort(times, kind="stable")[: self.size]]

    def candidates(self, epoch: int, position: int) -> int:
        return len(self._chosen)

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        return int(self._chosen[drawn_candidate(len(self._chosen), attempt, self._seed, epoch, position)])


@final
class MixedOrder:
    """Mixes several sources in fixed proportions: every epoch has the same number of samples of each.

    A permutation of each epoch decides which source has which position. The samples of a source are in that source's
    own order, which continues from one epoch to the next: its order's epoch 0, then its epoch 1, and so on. So a sample
    is repeated only after all others of its source were delivered the same number of times.

    Args:
        orders: of each source, with indices from 0 on.
        lengths: the number of its indices; those of a source follow those of the sources before it.
        weights: of each source, above 0.
        samples: of an epoch; with `run` above 1 they are filled up to whole runs.
        run: the number of neighbouring positions that one source gets: the batch size, if each batch is of one source.

    Examples:
        >>> order = MixedOrder([ShuffledOrder(size=9), ShuffledOrder(size=2)], [9, 2], [1.0, 1.0], samples=6)
        >>> int((order.indices(0, range(6)) >= 9).sum())  # the indices of the second source follow those of the first
        3
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
        self._table = lru_cache(maxsize=1)(self._draws)

    @property
    def size(self) -> int:
        return self._slots * self._run

    def _draws(self, epoch: int) -> Ints:
        """Return for each slot the number of its draw. Those of a source are counted after those of the sources before
        it."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        sources = sources[permute(np.arange(self._slots), self._slots, key64("mix", self._seed, epoch))]
        draws = np.empty(self._slots, np.int64)
        draws[np.argsort(sources, kind="stable")] = np.arange(self._slots)
        return draws

    def _places(self, epoch: int, places: Ints) -> tuple[Ints, Ints]:
        """Return for each position its source, and how many samples of that come before it in the epoch."""
        draws = self._table(epoch)[places // self._run]
        sources = np.searchsorted(self._ends, draws, side="right")
        drawn = draws - (self._ends - np.asarray(self.counts))[sources]
        return sources, drawn * self._run + places % self._run

    def _pass(self, source: int, epoch: int, before: int) -> tuple[int, int]:
        """Return the epoch and the position of a source's own order after `before` of its samples of this epoch."""
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
        """Return another sample of the same source."""
        source, own_epoch, place = self._at(epoch, position)
        return int(self._firsts[source]) + self._orders[source].replacement(own_epoch, place, attempt)

    def _at(self, epoch: int, position: int) -> tuple[int, int, int]:
        sources, before = self._places(epoch, np.array([position]))
        return int(sources[0]), *self._pass(int(sources[0]), epoch, int(before[0]))


@final
class MixInOrder:
    """Orders several sources one after the other, each in its own order: a mix that is not shuffled.

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
    """Return whole numbers in proportion to weights, which add up to `total`. None is one or more from its exact share.

    Examples:
        >>> apportion([1, 1, 2], 10)
        [3, 2, 5]
    """
    whole = sum(weights)
    shares = [total * (weight / whole) for weight in weights]
    counts = [min(int(share), total) for share in shares]
    largest_first = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in largest_first[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _uniform(key: int, epoch: int, places: Ints) -> Floats:
    """Return a number in [0, 1) for each place, with 53 random bits."""
    words = StageKeys(key, epoch % 2**64, places).uniform(2)
    return words[:, 0] + np.floor(words[:, 1] * 2.0**21) * 2.0**-53


def _log(values: Floats) -> Floats:
    """Return the natural logarithm of numbers in (0, 1], at most 0. A library's differs in the last bit between
    machines.

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


@dataclass(frozen=True, slots=True)
class ListedSteps:
    """Lists the batches of an epoch from number `start` on, with the methods of `Steps`.

    ends [steps]: how many samples come up to the end of each batch of the whole epoch. rank, world_size: see
    `ListedEpochs`.
    """

    ends: Ints
    rank: int
    world_size: int
    start: int

    def __len__(self) -> int:
        return max(len(self.ends) - self.start, 0)

    def positions(self, step: int) -> tuple[Ints, Bools]:
        number = self.start + step
        places = np.arange(self.ends[number - 1] if number else 0, self.ends[number], dtype=np.int64)
        return places * self.world_size + self.rank, np.ones(len(places), bool)

    def reached(self, step: int) -> int:
        return self.start + step


EpochSteps = Steps | ListedSteps
"""Lists the steps of an epoch that are still to come."""


@final
@dataclass(eq=False)
class ListedEpochs:
    """Orders samples and divides them into steps, as `draw` lists both when an epoch begins. See `Order` and `Steps`.

    The ranks take turns, sample by sample: the i-th sample of rank r of W has the position i*W + r. So samples of
    different ranks draw different random numbers, and those of `torch.utils.data.DistributedSampler`, which deals out
    one sequence in this way, draw the same on any number of ranks. A resumed epoch continues from the
    number of a batch.

    Args:
        draw: gets the epoch and the number of the first batch that is still to come, and returns the indices of this
            rank's samples, one after the other, and the number of samples in each batch.
        count: says how many batches an epoch has.
        samples: in the source.
        batch_size: of most batches.
        rank, world_size: this rank and how many there are.
        drawn: False if each sample comes once, in the source's order, and no batch is dropped.
    """

    digest = ""
    draw: Callable[[int, int], tuple[Ints, Sequence[int]]]
    count: Callable[[], int]
    samples: int
    batch_size: int
    rank: int
    world_size: int
    drawn: bool = True
    _drawn: tuple[int, Ints] | None = None

    @property
    def size(self) -> int:
        """Return the number of this rank's samples in the epoch that was drawn last; before the first, an estimate."""
        return max(self.samples, len(self)) if self._drawn is None else len(self._drawn[1])

    def __len__(self) -> int:
        return self.count()

    @property
    def stride(self) -> int:
        """Return the number of samples that all ranks together take in most steps."""
        return self.batch_size * self.world_size

    def left(self, start: int) -> int:
        """Return how many batches an epoch has from number `start` on."""
        return max(len(self) - start, 0)

    def begin(self, epoch: int, start: int) -> ListedSteps:
        """Draw an epoch, and return its steps from batch `start` on."""
        indices, sizes = self.draw(epoch, start)
        self._drawn = epoch, indices
        return ListedSteps(np.cumsum(sizes, dtype=np.int64), self.rank, self.world_size, start)

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        places = np.asarray(positions, np.int64) // self.world_size
        return self._listed(epoch)[places]

    def candidates(self, epoch: int, position: int) -> int:
        return len(self._listed(epoch))

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        """Return one of the samples that this rank has in the epoch: others may be kept for validation."""
        listed = self._listed(epoch)
        return int(listed[drawn_candidate(len(listed), attempt, epoch, position)])

    def _listed(self, epoch: int) -> Ints:
        """Return the samples of an epoch. Threads of one that was left may still ask once the next one is drawn."""
        if self._drawn is None or self._drawn[0] != epoch:
            raise LoaderError(f"epoch {epoch} is over")
        return self._drawn[1]
