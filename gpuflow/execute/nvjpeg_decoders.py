"""nvJPEG's decoders of one loader: at most one call at a time, or two while the consumer's GPU waits for a batch.

Two calls at once decode a fifth more images than one, but they cost a training step a sixth of its speed
(measured in experiments/gpu_path/NOTES.md). So the second is allowed only while no step is running.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode import self_test
from gpuflow.decode.blank_images import BLANK_COLOR, BLANK_LEVEL, interleave, round_up
from gpuflow.decode.nvjpeg import Engines, Library, NvjpegError
from gpuflow.errors import DecoderError, LoaderTimeout
from gpuflow.execute.blank_files import Blanks

if TYPE_CHECKING:
    from gpuflow.execute.device_stream import Delivery

__all__ = ["Decoder", "Decoders", "Files", "count_engines"]

_LOG = logging.getLogger(__name__)
_MOST = {"hardware": 2, "cuda": 1}
"""Concurrent calls, by nvJPEG's backend."""
_TURN_SECONDS = 60.0
_MOST_ENGINES = 16
_MANY_REFUSED = 64
"""Files refused one after the other, after which a decoder is tested."""
_TOLERANCE = 3
"""Levels by which nvJPEG's kernels may differ from the CPU."""


class Files(NamedTuple):
    """JPEGs of one call. data, lengths [N]: address (pinned host memory) and bytes of each.

    images [N, 8]: where each goes, as `Engines.decode` takes it. frames [N, 3]: height, width, sampling of each.
    """

    data: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    images: NDArray[np.uint64]
    frames: NDArray[np.int64]

    def part(self, which: slice) -> Files:
        return Files(self.data[which], self.lengths[which], self.images[which], self.frames[which])


class Decoder:
    """One nvJPEG decoder that works for a delivery, on its stream or on a second one. Not for two threads at once.

    count: finds out over how many engines a call is spread; 0 where a damaged file shows nothing of other images.
    engines: what it found.

    Raises NvjpegError where the GPU does not have the backend.
    """

    def __init__(
        self,
        delivery: Delivery,
        library: Library,
        color: str,
        backend: str,
        *,
        second: bool,
        count: Callable[[Decoder], int],
    ) -> None:
        self._delivery, self._color, self._refused = delivery, color, 0
        self._make = partial(Engines, library, color, backend)
        self._engines = self._make()
        self._stream = delivery.branch() if second else delivery.stream
        self._blanks = Blanks(delivery)
        self.engines = 0
        if backend == "hardware":
            self.engines = count(self)

    def decode(self, files: Files, blank: int | None = None) -> NDArray[np.bool_]:
        """Decode files; what is queued on the delivery from now on sees the pixels.

        A call that fails is split in two until the culprits stand alone.

        Args:
            blank: device memory for one blank image, an address: then each file is decoded right after a blank image
                of its size on the same engine.

        Returns:
            Which files were decoded, [N].

        Raises:
            DecoderError: the decoder refuses everything, gpuflow's own test image included, also after a new start.
        """
        good = self._halving(files, blank)
        self._delivery.join(self._stream)
        self._refused = self._refused + len(good) if not good.any() else 0
        if self._refused >= _MANY_REFUSED:
            self._refused = 0
            self.check()
        return good

    def _halving(self, files: Files, blank: int | None) -> NDArray[np.bool_]:
        count = len(files.data)
        data, lengths, images = files[:3] if blank is None else self._behind_blanks(files, blank)
        if self._engines.batch_size not in (0, len(data)):
            self._stream.synchronize()
        try:
            self._engines.decode(data, lengths, images, self._stream.cuda_stream)
        except NvjpegError:
            if count == 1:
                return np.array([False])
            middle = count // 2
            halves = (slice(None, middle), slice(middle, None))
            return np.concatenate([self._halving(files.part(half), blank) for half in halves])
        return np.ones(count, bool)

    def _behind_blanks(self, files: Files, blank: int) -> tuple[NDArray[np.uint64], ...]:
        """data, lengths and images of a call with blank images in between."""
        placed = interleave(len(files.data), self.engines)
        frames = files.frames[placed.shapes]
        frames[:, :2] = round_up(frames[:, :2])
        data, lengths = (np.empty(placed.total, np.uint64) for _ in range(2))
        images = np.zeros((placed.total, 8), np.uint64)
        data[placed.photographs], lengths[placed.photographs], images[placed.photographs] = files[:3]
        data[placed.blanks], lengths[placed.blanks] = self._blanks.files(frames)
        images[placed.blanks, 0], images[placed.blanks, 4] = blank, frames[:, 1] * self.channels
        return data, lengths, images

    @property
    def channels(self) -> int:
        return 1 if self._color == "gray" else 3

    def check(self) -> None:
        """Decode gpuflow's own test image; a decoder that fails is replaced. Raises DecoderError if that fails too."""
        if self._passes():
            return
        _LOG.warning("nvJPEG does not decode gpuflow's test image any more; its decoder is made anew")
        try:
            self._engines = self._make()
            if self._passes():
                return
        except NvjpegError as error:
            raise DecoderError(f"{error}; end this process and start another one") from error
        raise DecoderError("nvJPEG does not decode gpuflow's test image; end this process and start another one")

    def _passes(self) -> bool:
        (image,) = self.test_images([self_test.JPEG])
        if image is None:
            return False
        apart = image.astype(np.int64) - self_test.pixels(self._color)
        return int(np.abs(apart).max()) <= _TOLERANCE

    def test_images(self, files: list[NDArray[np.uint8]], engines: int | None = None) -> list[NDArray[np.uint8] | None]:
        """What it makes of files of the test image's size, uint8 [HEIGHT, WIDTH, C] each, or None for those refused.

        engines: over how many to spread blank images; None for no blank images.
        """
        delivery, pitch = self._delivery, self_test.WIDTH * self.channels
        space = self_test.HEIGHT * pitch
        encoded = delivery.pinned([sum(map(len, files))], torch.uint8).numpy()
        np.concatenate(files, out=encoded)
        lengths = np.array([len(data) for data in files], np.uint64)
        with delivery.queued():
            blank_space = int(np.prod(round_up(np.array([self_test.HEIGHT, self_test.WIDTH])))) * self.channels
            memory = torch.zeros(len(files) * space + blank_space, dtype=torch.uint8, device=delivery.device)
        delivery.synchronize()
        images = np.zeros((len(files), 8), np.uint64)
        images[:, 0], images[:, 4] = memory.data_ptr() + blank_space + space * np.arange(len(files)), pitch
        frame = np.array([[self_test.HEIGHT, self_test.WIDTH, self_test.SAMPLING]], np.int64)
        data = np.cumsum(lengths) - lengths + np.uint64(encoded.ctypes.data)
        call = Files(data, lengths, images, frame.repeat(len(files), axis=0))
        before, self.engines = self.engines, engines or 0
        try:
            good = self._halving(call, memory.data_ptr() if engines else None)
        finally:
            self.engines = before
        delivery.join(self._stream)
        delivery.synchronize()
        pixels = memory[blank_space:].cpu().numpy().reshape(len(files), self_test.HEIGHT, self_test.WIDTH, -1)
        return [image if decoded else None for image, decoded in zip(pixels, good.tolist(), strict=True)]


def count_engines(decoder: Decoder) -> int:
    """Over how many engines a call is spread, by what damaged files show behind blank images.

    Raises NvjpegError where that cannot be found out.
    """
    sound, damaged = self_test.JPEG, self_test.cut_off()
    level = np.array([BLANK_LEVEL] if decoder.channels == 1 else BLANK_COLOR)
    colors = (level, level[::-1])
    for engines in range(1, _MOST_ENGINES + 1):
        files = [sound if i % 3 else damaged for i in range(3 * engines)] + [damaged] * engines
        decoder.test_images([sound] * len(files))
        images = decoder.test_images(files, engines)
        corners = [
            image[-1, -1] for image, data in zip(images, files, strict=True) if data is damaged and image is not None
        ]
        if corners and all(any((corner == color).all() for color in colors) for corner in corners):
            return engines
    raise NvjpegError("a test of how images are spread over the engines", 9)


class Decoders:
    """The decoders of one runner. Any thread may call any method. Made of queues, which a Ctrl-C cannot leave locked.

    Raises NvjpegError where the GPU does not have the backend.
    """

    def __init__(
        self,
        delivery: Delivery,
        library: Library,
        color: str,
        backend: str,
        *,
        count: Callable[[Decoder], int] = count_engines,
    ) -> None:
        self._make = partial(Decoder, delivery, library, color, backend, count=count)
        first = self._make(second=False)
        self.engines = first.engines
        """Over how many engines a call is spread; 0 where a damaged file shows nothing of other images."""
        self._decoders: list[Decoder | None] = [first, *[None] * (_MOST[backend] - 1)]
        self._gpu_is_idle = False
        self._turns: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._turns.put(0)
        self._spare: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(1, len(self._decoders)):
            self._spare.put(place)

    def hurry(self, on: bool) -> None:
        """Whether the GPU waits for what is decoded. Takes effect at the next `lend`."""
        self._gpu_is_idle = on
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
            if place == 0 or self._gpu_is_idle:
                return place
            self._spare.put(place)

    def _decoder(self, place: int) -> Decoder:
        """The second one is made when it is first needed: it takes as much of the GPU's memory as the first."""
        decoder = self._decoders[place]
        if decoder is None:
            decoder = self._decoders[place] = self._make(second=True)
        return decoder
