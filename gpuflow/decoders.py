"""Who may be in nvJPEG: one thread, and a second one while the consumer's GPU has nothing to do without a batch.

Two calls beside each other decode a fifth more images than one, but they cost a training step a sixth of its speed
(measured in experiments/gpu_path/NOTES.md). So the second comes in only while no step is at work.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import LoaderTimeout
from gpuflow.nvjpeg import Engines, Library, NvjpegError

if TYPE_CHECKING:
    from gpuflow.delivery import Delivery

__all__ = ["Decoder", "Decoders"]

_MOST = {"hardware": 2, "cuda": 1}
"""Calls beside each other, by nvJPEG's backend."""
_TURN_SECONDS = 60.0


class Decoder:
    """One nvJPEG decoder that works for a delivery, on its stream or on one beside it. Not for two threads at once.

    Raises NvjpegError where the GPU does not have the backend.
    """

    def __init__(self, delivery: Delivery, library: Library, color: str, backend: str, *, beside: bool) -> None:
        self._delivery, self._engines = delivery, Engines(library, color, backend)
        self._stream = delivery.branch() if beside else delivery.stream

    def decode(
        self, data: NDArray[np.uint64], lengths: NDArray[np.uint64], images: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Decode a batch, as `Engines.decode` does; what is queued on the delivery from now on sees the pixels.

        A call that fails is split in two until the culprits stand alone. Returns which images were decoded, [N].
        """
        good = self._halving(data, lengths, images)
        self._delivery.join(self._stream)
        return good

    def _halving(
        self, data: NDArray[np.uint64], lengths: NDArray[np.uint64], images: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        if self._engines.batch_size not in (0, len(data)):
            self._stream.synchronize()
        try:
            self._engines.decode(data, lengths, images, self._stream.cuda_stream)
        except NvjpegError:
            if len(data) == 1:
                return np.array([False])
            middle = len(data) // 2
            halves = (slice(None, middle), slice(middle, None))
            return np.concatenate([self._halving(*(x[half] for x in (data, lengths, images))) for half in halves])
        return np.ones(len(data), bool)


class Decoders:
    """The decoders of one runner. Any thread may call any method. Made of queues, which a Ctrl-C cannot leave locked.

    Raises NvjpegError where the GPU does not have the backend.
    """

    def __init__(self, delivery: Delivery, library: Library, color: str, backend: str) -> None:
        self._make = partial(Decoder, delivery, library, color, backend)
        self._decoders: list[Decoder | None] = [self._make(beside=False), *[None] * (_MOST[backend] - 1)]
        self._hurried = False
        self._turns: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._turns.put(0)
        self._spare: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(1, len(self._decoders)):
            self._spare.put(place)

    def hurry(self, on: bool) -> None:
        """Whether the GPU waits for what is decoded. Takes effect at the next `lend`."""
        self._hurried = on
        if on:
            with suppress(queue.Empty):
                self._turns.put(self._spare.get_nowait())

    @contextmanager
    def lend(self) -> Iterator[Decoder]:
        """A decoder, once it is this thread's turn. Raises LoaderTimeout where a call before does not end."""
        place = self._take()
        try:
            yield self._decoder(place)
        finally:
            self._turns.put(place)

    def _take(self) -> int:
        while True:
            try:
                place = self._turns.get(timeout=_TURN_SECONDS)
            except queue.Empty:
                raise LoaderTimeout(
                    f"nvJPEG did not end a call within {_TURN_SECONDS:g} s; `nvidia-smi` tells what else runs there"
                ) from None
            if place == 0 or self._hurried:
                return place
            self._spare.put(place)

    def _decoder(self, place: int) -> Decoder:
        """The second one is made when it is first needed: it takes as much of the GPU's memory as the first."""
        decoder = self._decoders[place]
        if decoder is None:
            decoder = self._decoders[place] = self._make(beside=True)
        return decoder
