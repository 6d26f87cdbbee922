"""A batch while it is being filled, and the chunks that fill it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.sources import Payload

__all__ = ["Assembly", "Chunk"]


@dataclass(slots=True)
class Assembly:
    """A batch while it is being filled. Rows are samples.

    indices, labels, valid [B]: what each row holds. kept [B]: false where a bad sample was skipped.
    unfinished: chunks that are still to come.
    slots [B, ...]: the pixels, allocated when the first chunk is worked on: an array, or a tensor on the GPU.
    shared: the last rows, so many, are the CPU's beside a GPU. memory: where it puts them.
    there: labels, valid and indices on the GPU. They and the slots hold what they should once `ready` has passed.
    over: no chunk is to come any more, or there is an error, or the epoch is being ended.
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
    """Rows [start, stop) of a batch: the item that travels through SPDL."""

    batch: Assembly
    start: int
    stop: int
    last: bool
    payload: Payload | None = None
    prepared: Any = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def indices(self) -> list[int]:
        """Which samples its rows hold."""
        found: list[int] = self.batch.indices[self.start : self.stop].tolist()
        return found
