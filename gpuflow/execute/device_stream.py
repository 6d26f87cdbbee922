"""The way onto a GPU: a loader's one stream, what the GPU may still be reading of it, and what runs chunks there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.header_scan import Prescan
from gpuflow.pipeline.image_spec import slot_shape

if TYPE_CHECKING:
    from gpuflow.errors import BadSampleError
    from gpuflow.pipeline.stage import ImageSpec, Keys
    from gpuflow.sources import Payload

__all__ = ["ChunkRunner", "Delivery", "slots_on", "starved"]

_ALIGN = 16


class Delivery:
    """One loader's stream. It has the lowest priority, so that a training step comes first where they compete.

    Nothing here waits for the GPU but `synchronize` and `close`. Any thread may call any method.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self.device = self.stream.device
        self._kept: deque[tuple[torch.cuda.Event, NDArray[Any], Callable[[NDArray[Any]], None] | None]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def queued(self) -> Iterator[None]:
        """What the block does on the device is queued on the stream, and leaves no trace on another GPU."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def mark(self, *, wait: bool = False) -> torch.cuda.Event:
        """An event behind everything queued so far. wait: a thread that waits for it sleeps and does not spin."""
        event = torch.cuda.Event(blocking=wait)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def keep(self, memory: NDArray[Any], give: Callable[[NDArray[Any]], None] | None = None) -> None:
        """Hold on to memory until what is queued so far is through; then `give` gets it, at some later call of this."""
        passed = []
        with self._lock:
            self._kept.append((self.mark(), memory, give))
            while self._kept and self._kept[0][0].query():  # type: ignore[no-untyped-call]
                passed.append(self._kept.popleft())
        for _, memory, give in passed:
            if give is not None:
                give(memory)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the GPU copies from directly. torch keeps it until copies that it began are through."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def send(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device, which holds it once the stream has passed; of pinned memory without a wait."""
        with self.queued():
            return host.to(self.device, non_blocking=True)

    def fill(self, there: torch.Tensor, host: torch.Tensor) -> None:
        """Queue a copy into memory on the device, of the same shape and strides; of pinned memory without a wait."""
        with self.queued():
            there.copy_(host, non_blocking=True)

    def send_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Copies of small arrays on the device, in one transfer: each a tensor of its dtype and shape."""
        arrays = [np.array(array, order="C") for array in arrays]
        starts = np.cumsum([0, *(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)]).tolist()
        host = self.pinned([starts.pop()], torch.uint8)
        views = []
        for start, array in zip(starts, arrays, strict=True):
            host.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            views.append((start, array.nbytes, torch.from_numpy(array).dtype, array.shape))
        there = self.send(host)
        return [there[start : start + size].view(dtype).view(shape) for start, size, dtype, shape in views]

    def branch(self) -> torch.cuda.Stream:
        """A stream beside this one, of the same priority."""
        return torch.cuda.Stream(self.device, priority=0)  # type: ignore[no-untyped-call]

    def join(self, branch: torch.cuda.Stream) -> None:
        """What is queued from now on begins when the branch has done what it was given so far."""
        if branch is not self.stream:
            self.stream.wait_stream(branch)

    def synchronize(self) -> None:
        """Wait, on the host, until the GPU has done what is queued."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait until the GPU has read all that it was given, and let go of it."""
        self.synchronize()
        with self._lock:
            self._kept.clear()


def slots_on(delivery: Delivery, count: int, spec: ImageSpec) -> torch.Tensor:
    """Memory on the device for so many images: [count, C, H, W] in the spec's dtype and memory format."""
    with delivery.queued():
        memory = torch.empty((count, *slot_shape(spec)), dtype=getattr(torch, spec.dtype), device=delivery.device)
    return memory if spec.layout == "nchw" else memory.permute(0, 3, 1, 2)


def starved(consumer: torch.cuda.Stream, last: tuple[torch.cuda.Event, torch.cuda.Event] | None) -> bool:
    """Whether the consumer's stream has done all that it was asked to, or waits for the batch that it was given last.

    A training step queues its work ahead of the GPU. That it asks for a batch does not say that the GPU needs it yet.

    Args:
        last: of that batch, an event behind what the consumer had queued before, and one behind what the loader had.
    """
    if consumer.query():
        return True
    return last is not None and last[0].query() and not last[1].query()  # type: ignore[no-untyped-call]


class ChunkRunner(Protocol):
    """What runs chunks on a delivery's device in the CPU's place. Any thread may call any method.

    engine_images, cpu_images: how many images were decoded there, and how many the CPU had to.
    """

    engine_images: int
    cpu_images: int

    def hurry(self, on: bool) -> None:
        """Whether the device has nothing to do without the next batch: what would slow other work down does not now."""

    def check(self) -> None:
        """Have it decode gpuflow's own test image. Raises DecoderError where that fails."""

    @property
    def prescan(self) -> Prescan | None:
        """What a worker that reads may find out of a payload before `prepare` gets it; None for nothing."""

    def prepare(self, payload: Payload, keys: Keys, indices: Sequence[int] | None = None) -> Any:
        """All of a chunk that can be done before it has its slots. The payload's memory stays until it is launched.

        indices: which samples of the source it holds, where it holds such.
        """

    def slots(self, count: int) -> torch.Tensor:
        """Memory on the device for so many results: [count, C, H, W] in the result's dtype and memory format."""
        ...

    def launch(self, chunk: Any, slots: torch.Tensor) -> list[BadSampleError | None]:
        """Queue what fills a prepared chunk's slots; returns for each sample None, or why it is bad."""
        ...
