"""Which sample is at which position: a pure function of (seed, epoch, position), computed without a list in memory.

A *position* is a sample's place in the epoch's global sequence. The sequence is a permutation of the source's indices
that does not depend on the number of ranks: rank r of W takes positions [(kW+r)B, (kW+r+1)B) at step k.

`gpuflow.pipeline.rng.permute` computes the permutation: one position takes the same time among 10 samples as among
10^12.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from gpuflow.arrays import Bools, Ints
from gpuflow.pipeline.rng import key64, permute


class Order(Protocol):
    """Which index of the source stands at a position of an epoch."""

    @property
    def size(self) -> int:
        """Number of samples in an epoch."""

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        """The source's indices at these positions (each in [0, size)), as int64 of the same shape."""

    def candidates(self, epoch: int, position: int) -> int:
        """How many indices may stand in for a bad sample at a position, that sample's own included."""

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        """The index that stands in for a bad sample: attempts 0..candidates-1 run through every such index once."""

    @property
    def digest(self) -> str:
        """A hash of the numbers that it draws by, such as weights; empty for an order without any."""


def drawn_candidate(candidates: int, attempt: int, *key: object) -> int:
    """Which of the indices that may stand in for a bad sample an attempt takes. key: what the draw depends on."""
    return int(permute([attempt], candidates, key64("replace", *key))[0])


class EpochSteps(Protocol):
    """The steps of an epoch that are still to come."""

    @property
    def size(self) -> int:
        """Number of samples in the whole epoch."""

    def __len__(self) -> int: ...

    def positions(self, step: int) -> tuple[Ints, Bools]:
        """The positions of this rank's batch at `step`, and which of them are valid (not wrapped)."""

    def reached(self, step: int) -> int:
        """Where the epoch stands after `step` of these steps, as `LoaderPlan.steps.begin` takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffledOrder:
    """The whole source in one permutation an epoch, or in its own order when `shuffle` is false."""

    size: int
    seed: int = 0
    shuffle: bool = True
    digest: str = field(default="", init=False, repr=False)

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
    """Shards in a permuted order, then a permutation inside fixed windows of their concatenation.

    Consecutive positions stay within a few shards, so that reading them is close to sequential, and a sample can still
    land anywhere within its window.

    Args:
        shard_sizes: samples in each shard, in the source's order.
        window: positions that are permuted among each other.
    """

    shard_sizes: tuple[int, ...]
    seed: int = 0
    window: int = 8192
    digest: str = field(default="", init=False, repr=False)

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
    """How an epoch of `size` positions falls into steps over ranks.

    The epoch starts at position `start` (0, or where a restored state left off). All ranks make the same number of
    steps. Without `drop_last` the last step is short on a single rank; on several ranks it is filled by wrapping
    around to the epoch's first positions, and what is wrapped is not valid.

    Args:
        size: samples in the epoch.
        batch_size: samples a rank takes in a step.
        rank, world_size: this rank and how many there are.
        drop_last: leave out the last step where it cannot be filled.
        start: first position of the epoch that is still to come.
    """

    size: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    start: int = 0

    @property
    def stride(self) -> int:
        """Positions that all ranks together take in a step."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        left = max(self.size - self.start, 0)
        return left // self.stride if self.drop_last else -(-left // self.stride)

    def left(self, start: int) -> int:
        """How many steps an epoch has from position `start` on."""
        return len(replace(self, start=start))

    def begin(self, epoch: int, start: int) -> Steps:
        """What is left of an epoch from position `start` on."""
        return replace(self, start=start)

    def reached(self, step: int) -> int:
        """The first position that is still to come after `step` steps."""
        return self.start + step * self.stride

    def positions(self, step: int) -> tuple[Ints, Bools]:
        """The positions of this rank's batch at `step`, and which of them are valid (not wrapped)."""
        first = self.start + step * self.stride + self.rank * self.batch_size
        places = np.arange(first, first + self.batch_size, dtype=np.int64)
        if self.world_size == 1:
            places = places[places < self.size]
        return places % self.size, places < self.size
