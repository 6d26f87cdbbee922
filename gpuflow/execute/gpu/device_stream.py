"""A loader's CUDA stream, the memory that work on it still needs, and the protocol of what runs chunks on it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from gpuflow.arrays import Array, Bytes, Ints
from gpuflow.errors import LoaderTimeout
from gpuflow.execute import packing
from gpuflow.pipeline.views import slot_shape

if TYPE_CHECKING:
    from gpuflow.errors import BadSampleError
    from gpuflow.pipeline.stage import ImageSpec, Keys
    from gpuflow.sources import Payload


T = TypeVar("T")
SHORT_WAIT = 0.05
"""If a GPU waits for batches for a larger share of its time, a second decode buffer may shorten these waits."""
LONG_WAIT = 0.5
"""If it waits for a larger share than this, it has little other work: a second concurrent nvJPEG call slows nothing,
and more finished batches may shorten the waits. Where the GPU waited less, more finished batches made no measurable
difference to a training's speed (experiments/real_data/NOTES.md)."""

_current = threading.local()
"""`device_stream`: in whose `queued` block this thread is."""


class DeviceStream:
    """A loader's CUDA stream. It has the lowest priority: a training step that competes for the GPU runs first.

    Only `receive`, `synchronize` and `close` wait for the GPU. Any thread may call any method.

    stream: an existing stream of the device to use instead of a new one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream or torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self.device = self.stream.device
        self._retained: deque[tuple[torch.cuda.Event, Any, Callable[[Any], None] | None]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Make this stream and its device current, so that the block's device work is queued here and nowhere else.

        Within such a block of the same thread it does nothing, because torch takes long to change its current stream.
        """
        outer: DeviceStream | None = getattr(_current, "device_stream", None)
        if outer is self:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            _current.device_stream = self
            try:
                yield
            finally:
                _current.device_stream = outer

    def record_event(self, *, blocking: bool = False, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Record an event after all work queued so far. blocking: a thread that waits for it sleeps, not spins.

        stream: another stream of the same device whose work is meant.
        """
        event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(stream or self.stream)
        return event

    def retain_until_done(self, memory: T, on_done: Callable[[T], None] | None = None) -> None:
        """Retain memory, an array or several, until all work queued so far is done; a later call of this method then
        calls `on_done`."""
        done = []
        with self._lock:
            self._retained.append((self.record_event(), memory, on_done))
            while self._retained and self._retained[0][0].query():  # type: ignore[no-untyped-call]
                done.append(self._retained.popleft())
        for _, memory, on_done in done:
            if on_done is not None:
                on_done(memory)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned host memory, which the GPU copies from. torch keeps it until copies begun by torch end."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def send(self, host: torch.Tensor) -> torch.Tensor:
        """Queue a copy to the device and return it; copying from pinned memory does not block the host."""
        with self.queued():
            return host.to(self.device, non_blocking=True)

    def copy_into(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Queue a copy into device memory of the same shape and strides; from pinned memory it does not block."""
        with self.queued():
            target.copy_(host, non_blocking=True)

    def send_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Copy small arrays to the device in one transfer: for each array a tensor of its dtype and shape."""
        with self.queued():
            return packing.send_all(arrays, self.device)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy device memory to pinned host memory. Waits, asleep, until all work queued so far is done."""
        with self.queued():
            host = self.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
        self.record_event(blocking=True).synchronize()
        return host

    def on_new_stream(self) -> DeviceStream:
        """Make another `DeviceStream` for the same device: a new CUDA stream with the same priority."""
        return DeviceStream(self.device)

    def wait_stream(self, other: torch.cuda.Stream) -> None:
        """Have later work begin once the other stream has finished what was queued there so far."""
        if other is not self.stream:
            self.stream.wait_stream(other)

    def synchronize(self) -> None:
        """Block the host until the GPU has finished all queued work."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait until all queued work is done, then release the retained memory."""
        self.synchronize()
        with self._lock:
            self._retained.clear()


def take_free(free: queue.SimpleQueue[T], seconds: float, failure: str) -> T:
    """Take an item from a queue of free resources.

    Raises LoaderTimeout, whose text begins with `failure`, if none is free within `seconds`.
    """
    try:
        return free.get(timeout=seconds)
    except queue.Empty:
        raise LoaderTimeout(f"{failure} within {seconds:g} s; `nvidia-smi` shows what else runs there") from None


def allocate_slots(device_stream: DeviceStream, count: int, spec: ImageSpec) -> torch.Tensor:
    """Allocate device memory for `count` images: [count, C, H, W] in the spec's dtype and memory format."""
    with device_stream.queued():
        shape, dtype = (count, *slot_shape(spec)), getattr(torch, spec.dtype)
        slots = torch.empty(shape, dtype=dtype, device=device_stream.device)
    return slots if spec.layout == "nchw" else slots.permute(0, 3, 1, 2)


class ChunkRunner(Protocol):
    """Runs chunks on the device of a `DeviceStream`. Any thread may call any method.

    What `prepare` returns has `sizes` [N, 2], the heights and widths of the upright images, unless the program's
    decoder has its own library.

    engine_images, cpu_images: how many images were decoded on the device, and how many on the CPU instead.
    """

    engine_images: int
    cpu_images: int

    def set_gpu_wait(self, share: float) -> None:
        """Set the share of its time for which the consumer's GPU waits for batches, 0 to 1."""

    def check(self) -> None:
        """Decode gpuflow's own test image. Raises DecoderError if that fails."""

    def share_checks(self, samples: int, memory_of: Callable[[int], Bytes | None]) -> None:
        """Share with the ranks of this host which files of a source of that many samples were checked.

        memory_of: gives memory of a size in bytes, zeros at first, that these ranks share; None if there is none.
        """

    def prepare(self, payload: Payload, keys: Keys, indices: Sequence[int] | Ints | None = None) -> Any:
        """Do all work on a chunk that needs no slots. The payload's memory must stay valid until it is launched.

        indices: the indices in the source of the chunk's samples, or None if they are not from a source.
        """

    def slots(self, count: int) -> Any:
        """Allocate device memory for `count` results: [count, C, H, W] in the result's dtype and memory format, or
        `ViewSlots` of tensors."""

    def launch(self, chunk: Any, slots: Any, ahead: Sequence[Any] = ()) -> list[BadSampleError | None]:
        """Queue the work that fills a prepared chunk's slots; returns for each sample None, or why it is bad.

        ahead: prepared chunks that are launched later, in that order. Work on them may begin.
        """
        ...

    def close(self) -> None:
        """End threads. Nothing may be prepared or launched any more."""
