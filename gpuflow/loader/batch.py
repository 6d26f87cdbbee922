"""What the loop gets (`Batch`), the same while it is being filled (`Assembly`), and the chunks that fill it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.sources import Payload

__all__ = ["Assembly", "Batch", "Chunk"]


class Batch(tuple[torch.Tensor, torch.Tensor]):
    """The pair (images, labels), which is what a training loop unpacks, and what else is known of it.

    images: [N, C, H, W] in the dtype and memory layout that the pipeline ends with. labels: int64 [N]. Of a pipeline
    with views it is the pair (views, labels); views: name to tensor [count, N, C, H, W].
    valid: bool [N], false where a sample was wrapped around to fill the last step of several ranks.
    indices: int64 [N], each sample's index in the source. step: of the epoch, from 0. epoch: from 0.
    """

    valid: torch.Tensor
    indices: torch.Tensor
    step: int
    epoch: int

    def __new__(cls, pair: Iterable[Any], **known: Any) -> Batch:
        """As `tuple(pair)`, for tools that rebuild a container around moved tensors; other knowledge is then lost."""
        self = super().__new__(cls, pair)
        vars(self).update(known)
        return self

    @property
    def images(self) -> torch.Tensor:
        return self[0]

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """What stands in place of `images` if the pipeline has views."""
        views: Any = self[0]
        assert isinstance(views, dict), "its pipeline has no views"
        return views

    @property
    def labels(self) -> torch.Tensor:
        return self[1]


@dataclass(slots=True)
class Assembly:
    """A batch while it is being filled. Rows are samples.

    indices, labels, valid [B]: of each row's sample. kept [B]: false where a bad sample was skipped.
    unfinished: chunks that are not decoded yet.
    slots [B, ...]: the pixels, allocated for the first chunk: an array, `ViewSlots`, or on the GPU a tensor or, of
        views, a dict of them.
    shared: the number of last rows that the CPU decodes next to a GPU. memory: where it decodes them to.
    there: labels, valid and indices on the GPU. They and the slots are complete once the event `ready` has passed.
    over: done once all chunks are decoded, or there is an error, or the epoch is being ended.
    """

    step: int
    positions: NDArray[np.int64]
    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    valid: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    unfinished: int
    slots: Any = None
    shared: int = 0
    memory: NDArray[np.uint8] | None = None
    there: Sequence[torch.Tensor] = ()
    ready: torch.cuda.Event | None = None
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: Future[None] = field(default_factory=Future)

    @property
    def own(self) -> int:
        """Rows that are not shared."""
        return len(self.positions) - self.shared

    def fail(self, error: BaseException) -> None:
        """Remember the first error; the loader raises it when this batch's turn has come."""
        with self.lock:
            self.error = self.error or error
        self.end()

    def end(self) -> None:
        """No chunk is waited for any more. Again does nothing."""
        with suppress(InvalidStateError):
            self.over.set_result(None)


@dataclass(slots=True)
class Chunk:
    """Rows [start, stop) of a batch: the item that travels through SPDL.

    replacement: the index of the sample that is tried in a bad one's place, while one is.
    """

    batch: Assembly
    start: int
    stop: int
    last: bool
    payload: Payload | None = None
    prepared: Any = None
    replacement: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def indices(self) -> list[int]:
        """Which samples its rows hold."""
        found: list[int] = self.batch.indices[self.start : self.stop].tolist()
        return found
