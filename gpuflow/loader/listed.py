"""Epochs whose batches a sampler of PyTorch, or another object, lists in place of gpuflow's own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from gpuflow.arrays import Bools, Ints
from gpuflow.errors import LoaderError
from gpuflow.loader.sampler import drawn_candidate


@dataclass(frozen=True, slots=True)
class ListedSteps:
    """The batches of an epoch from number `start` on. See `EpochSteps`.

    ends [steps]: how many samples come up to the end of each batch of the whole epoch. rank, world_size: see
    `ListedEpochs`.
    """

    ends: Ints
    rank: int
    world_size: int
    start: int

    @property
    def size(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return max(len(self.ends) - self.start, 0)

    def positions(self, step: int) -> tuple[Ints, Bools]:
        number = self.start + step
        places = np.arange(self.ends[number - 1] if number else 0, self.ends[number], dtype=np.int64)
        return places * self.world_size + self.rank, np.ones(len(places), bool)

    def reached(self, step: int) -> int:
        return self.start + step


@final
class ListedEpochs:
    """Which sample comes when, and in which step, as `draw` lists it when an epoch begins. See `Order` and `Steps`.

    The ranks take turns, sample by sample: the i-th sample of rank r of W has the position i*W + r. So samples of
    different ranks draw different random numbers, and those of `torch.utils.data.DistributedSampler`, which deals out
    one sequence in this way, draw the same on any number of ranks. An epoch that is resumed goes on from the number of
    a batch.

    Args:
        draw: gets the epoch and the number of the first batch that is still to come, and returns the indices of this
            rank's samples, one after the other, and the number of samples in each batch.
        count: says how many batches an epoch has.
        samples: in the source.
        batch_size: of most batches.
        rank, world_size: this rank and how many there are.
        drawn: False if each sample comes once, in the source's order, and no batch is dropped.
    """

    def __init__(
        self,
        draw: Callable[[int, int], tuple[Ints, Sequence[int]]],
        count: Callable[[], int],
        *,
        samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        drawn: bool = True,
    ) -> None:
        self._draw, self._count, self._samples = draw, count, samples
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.drawn = drawn
        self._drawn: tuple[int, Ints] | None = None
        self.digest = ""

    @property
    def size(self) -> int:
        """Samples of this rank in the epoch that was drawn last; before the first, an estimate."""
        return max(self._samples, len(self)) if self._drawn is None else len(self._drawn[1])

    def __len__(self) -> int:
        return self._count()

    @property
    def stride(self) -> int:
        """Samples that all ranks together take in most steps."""
        return self.batch_size * self.world_size

    def left(self, start: int) -> int:
        """How many batches an epoch has from number `start` on."""
        return max(len(self) - start, 0)

    def begin(self, epoch: int, start: int) -> ListedSteps:
        """Draw an epoch; what is left of it from batch `start` on."""
        indices, sizes = self._draw(epoch, start)
        self._drawn = epoch, indices
        return ListedSteps(np.cumsum(sizes, dtype=np.int64), self.rank, self.world_size, start)

    def indices(self, epoch: int, positions: ArrayLike) -> Ints:
        places = np.asarray(positions, np.int64) // self.world_size
        return self._listed(epoch)[places]

    def candidates(self, epoch: int, position: int) -> int:
        return len(self._listed(epoch))

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        """Of the samples that this rank has in the epoch: others may be kept for validation."""
        listed = self._listed(epoch)
        return int(listed[drawn_candidate(len(listed), attempt, epoch, position)])

    def _listed(self, epoch: int) -> Ints:
        """The samples of an epoch. Threads of one that was left may still ask once the next one is drawn."""
        if self._drawn is None or self._drawn[0] != epoch:
            raise LoaderError(f"epoch {epoch} is over")
        return self._drawn[1]
