"""A loader's nvJPEG decoders: limits concurrent nvJPEG calls to one, or two while the GPU waits for a batch.

Two concurrent calls decode a fifth more images than one, but they cost a training step a sixth of its speed
(measured in experiments/gpu_path/NOTES.md). So a second call is allowed only while no step is running.
"""

from __future__ import annotations

import errno
import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.decode.codecs import pixels_of_test_image
from gpuflow.decode.header import TEST_HEIGHT, TEST_JPEG, TEST_SAMPLING, TEST_WIDTH
from gpuflow.decode.nvjpeg import BatchedDecoder, NvjpegError, NvjpegLibrary
from gpuflow.errors import DecoderError, SystemFault
from gpuflow.execute.gpu.decode_calls import CALL_IMAGES
from gpuflow.execute.gpu.device_stream import DeviceStream, take_free
from gpuflow.execute.gpu.gpu_call import GpuCall

_LOG = logging.getLogger(__name__)
_MAX_CALLS = {"hardware": 2, "cuda": 1, "cuda_few": 1}
"""The largest number of concurrent calls for each nvJPEG backend."""
CALL_SECONDS = 60.0
_MANY_REFUSED = 64
"""Number of consecutive files refused after which a decoder is tested."""
_LARGE_IMAGES = 8
"""If more files of one call find no memory, the GPU is full; a few are larger than others, and the CPU decodes them."""
_TOLERANCE = 3
"""Levels of 0-255 by which nvJPEG's kernels may differ from the CPU."""
_TEST_REGION = 13, 7, 30, 21
"""The x, y, width and height of a part of the test image; nothing of it is at a multiple of 2."""
_REGIONS_SINCE = 13, 3
"""The libnvjpeg whose parts of images are trusted. The test image does not show what 13.0.1 does on an H200: pixels of
parts are up to 7 levels apart from those of whole images. With 13.3.2 they are equal."""


class JpegBatch(NamedTuple):
    """The N JPEG files of one nvJPEG call.

    data, lengths [N]: address in pinned host memory and size in bytes of each file.
    images [N, 8]: where each image is written, as `BatchedDecoder.decode` takes it.
    regions [N, 4]: which part of each is written: x, y, width and height in pixels; None for all of it.
    sampling: of all of them.
    """

    data: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    images: NDArray[np.uint64]
    sampling: int
    regions: Ints | None = None

    @classmethod
    def of(cls, entries: Ints, addresses: Ints, sampling: int, *, with_regions: bool) -> JpegBatch:
        """Make a call whose images are interleaved, each written to an address.

        entries [N, 7]: address in pinned host memory and size in bytes of each file, the bytes of a row of pixels where
            the image is written, and the x, y, width and height of the part of it that is written.
        """
        images = np.zeros((len(entries), 8), np.int64)
        images[:, 0], images[:, 4] = addresses, entries[:, 2]
        data, lengths = entries[:, :2].T.astype(np.uint64, order="C")
        return cls(data, lengths, images.view(np.uint64), sampling, entries[:, 3:].copy() if with_regions else None)

    def part(self, which: slice) -> JpegBatch:
        regions = None if self.regions is None else self.regions[which]
        return JpegBatch(self.data[which], self.lengths[which], self.images[which], self.sampling, regions)

    def filled_up(self, filler: JpegBatch, count: int) -> JpegBatch:
        """Return these files, without regions, filled up to `count` with the one of `filler`."""
        times = max(0, count - len(self.data))
        pairs = zip(self[:3], filler[:3], strict=True)
        data, lengths, images = (np.concatenate([own, one.repeat(times, 0)]) for own, one in pairs)
        return JpegBatch(data, lengths, images, self.sampling)


class _TestFile(NamedTuple):
    """A call of gpuflow's own test image. encoded: the file, pinned. pixels: where it is written, uint8 [H, W, C]."""

    call: JpegBatch
    encoded: Bytes
    pixels: torch.Tensor


@dataclass(slots=True)
class _State:
    """A state of nvJPEG. queued: an event after its last call, or None before the first one."""

    decoder: BatchedDecoder
    queued: torch.cuda.Event | None = None


class NvjpegDecoder:
    """One nvJPEG decoder that queues its work on a loader's stream, or on a second stream. Not thread-safe.

    With CUDA kernels, a call begins once the GPU has finished the call before it: nvJPEG writes over what these still
    read, and leaves images as the memory was (tests/execute/gpu/test_history.py).

    With CUDA kernels, a call is filled up to CALL_IMAGES images with copies of a tiny one. In calls of fewer than 50 or
    100 images, depending on its version, nvJPEG leaves the Huffman codes to the processor, and some pixels of the same
    file differ by up to 3 levels (measured in experiments/real_data/NOTES.md). `cuda_few` always leaves them to it.

    It has a state of nvJPEG for each chroma sampling: one that decodes several samplings in turn sets the engines up
    anew for each call (20,400 instead of 28,100 images/s for two samplings in turn, experiments/real_data).

    Raises NvjpegError if the GPU does not have the backend.
    """

    def __init__(
        self,
        device_stream: DeviceStream,
        library: NvjpegLibrary,
        color: str,
        backend: str,
        *,
        second: bool,
    ) -> None:
        self._device_stream, self._color, self._second = device_stream, color, second
        self._library = library
        self._on_engines = backend == "hardware"
        self._refused, self._without_memory = 0, 0
        self._reported = set[int]()
        """The statuses of nvJPEG that were logged."""
        self._make = partial(BatchedDecoder, library, color, backend)
        self._states = {TEST_SAMPLING: _State(self._make())}
        self._stream = device_stream.on_new_stream().stream if second else device_stream.stream
        self._filler = self._test_file() if backend == "cuda" else None

    def decode(self, files: JpegBatch, call: GpuCall | None = None) -> Bools:
        """Decode files of one chroma sampling. Work queued on the loader's stream from now on sees the pixels.

        A call that fails is retried by halves until each damaged file, and each one that is too large for the GPU's
        free memory, is in a separate call.

        call: what to queue together with the decoding; it is not queued if the decoding of all files at once fails.

        Returns:
            Which files were decoded, [N].

        Raises:
            DecoderError: the decoder fails on gpuflow's own test image too, even after it was replaced.
            SystemFault: there is no GPU memory for many of the files, or for one file of a second decoder's.
        """
        self._without_memory = 0
        good = self._decode_by_halves(files, call)
        if call is None or not call.queued:
            self._device_stream.wait_stream(self._stream)
        self._refused = self._refused + len(good) if not good.any() else 0
        if self._refused >= _MANY_REFUSED:
            self._refused = 0
            self.check()
        return good

    def _decode_by_halves(self, files: JpegBatch, call: GpuCall | None = None) -> Bools:
        count = len(files.data)
        try:
            if files.sampling not in self._states:
                self._states[files.sampling] = _State(self._make())
        except NvjpegError as error:
            self._report(error)
            return self._refuse(count, error)
        try:
            self._queue(self._states[files.sampling], files, call)
        except NvjpegError as error:
            self._report(error)
            if count == 1:
                return self._refuse(1, error)
            middle = count // 2
            halves = (slice(None, middle), slice(middle, None))
            return np.concatenate([self._decode_by_halves(files.part(half)) for half in halves])
        return np.ones(count, bool)

    def _queue(self, state: _State, files: JpegBatch, call: GpuCall | None) -> None:
        """Queue one call of nvJPEG, and what else is queued with it. Raises NvjpegError."""
        if self._filler is not None:
            files = files.filled_up(self._filler.call, CALL_IMAGES)
        data, lengths, images, _, regions = files
        stream = self._stream.cuda_stream
        # C code waits itself before it initializes a state for another number of images.
        initializes = call is None and state.decoder.batch_size != len(data)
        if state.queued is not None and (initializes or not self._on_engines):
            state.queued.synchronize()  # an earlier call may still be running
        if call is not None:
            state.queued = state.queued or self._device_stream.record_event(stream=self._stream)
            call.queue_decoding(state.decoder, data, lengths, images, stream, state.queued, regions)
            return
        try:
            state.decoder.decode(data, lengths, images, stream, regions)
        finally:
            state.queued = self._device_stream.record_event(stream=self._stream)

    def _refuse(self, count: int, error: NvjpegError) -> Bools:
        """Return the result for files that nvJPEG does not decode. Raises SystemFault, see `decode`."""
        if error.lacks_memory:
            self._without_memory += count
            if self._second or self._without_memory > _LARGE_IMAGES:
                advice = "free GPU memory, let fewer processes decode on this GPU, or lower batch.size"
                raise SystemFault(errno.ENOMEM, f"{error}; {advice}") from error
        return np.zeros(count, bool)

    def _report(self, error: NvjpegError) -> None:
        """Log a failed call if it says nothing of a file, the first one of each status."""
        if not error.is_of_a_file and error.status not in self._reported:
            self._reported.add(error.status)
            text = str(error)  # a handler that keeps the error itself would keep the call's memory by its traceback
            _LOG.warning("%s; the images of such a call are decoded in smaller calls, or by the CPU", text)

    def free(self) -> None:
        """Give its memory back, once the GPU has finished all its calls. It is not to be used any more."""
        for state in self._states.values():
            if state.queued is not None:
                state.queued.synchronize()
        with self._device_stream.queued():
            self._states.clear()

    def decodes_regions(self) -> bool:
        """Return True if the engines write a part of an image with the pixels that it has in the whole one.

        They decode gpuflow's own test image; CUDA kernels are not tried. Raises SystemFault without memory for it.
        """
        if not self._on_engines or self._library.version_info < _REGIONS_SINCE:
            return False
        x, y, width, height = _TEST_REGION
        whole, part = self._test_image(), self._test_image(_TEST_REGION)
        return whole is not None and part is not None and np.array_equal(part, whole[y : y + height, x : x + width])

    def check(self) -> None:
        """Decode gpuflow's own test image; replace a decoder that fails. Raises DecoderError if the new one fails."""
        try:
            if self._passes():
                return
            _LOG.warning("nvJPEG no longer decodes gpuflow's test image; its decoder is replaced")
            self._states = {TEST_SAMPLING: _State(self._make())}
            if self._passes():
                return
        except SystemFault as fault:
            raise DecoderError(f"nvJPEG does not decode gpuflow's test image: {fault.strerror}") from fault
        except NvjpegError as error:
            raise DecoderError(f"{error}; end this process and start another one") from error
        raise DecoderError("nvJPEG does not decode gpuflow's test image; end this process and start another one")

    def _passes(self) -> bool:
        image = self._test_image()
        expected = pixels_of_test_image(self._color)
        return image is not None and bool((np.abs(image.astype(np.int64) - expected) <= _TOLERANCE).all())

    def _test_image(self, region: tuple[int, int, int, int] | None = None) -> Bytes | None:
        """Decode gpuflow's own test image, or a part of it: uint8 [height, width, C], or None if it was refused.

        region: x, y, width, height of the part.
        """
        file = self._test_file(region)
        self._without_memory = _LARGE_IMAGES  # this image is small
        (decoded,) = self._decode_by_halves(file.call)
        self._device_stream.wait_stream(self._stream)
        self._device_stream.synchronize()
        return file.pixels.cpu().numpy() if decoded else None

    def _test_file(self, region: tuple[int, int, int, int] | None = None) -> _TestFile:
        """See `_test_image`."""
        x, y, width, height = region or (0, 0, TEST_WIDTH, TEST_HEIGHT)
        device_stream, channels = self._device_stream, 1 if self._color == "gray" else 3
        encoded = device_stream.pinned([len(TEST_JPEG)], torch.uint8).numpy()
        encoded[:] = TEST_JPEG
        with device_stream.queued():
            memory = torch.zeros((height, width, channels), dtype=torch.uint8, device=device_stream.device)
        device_stream.synchronize()
        entries = np.array([[encoded.ctypes.data, len(encoded), width * channels, x, y, width, height]])
        address = np.array([memory.data_ptr()])
        call = JpegBatch.of(entries, address, TEST_SAMPLING, with_regions=region is not None)
        return _TestFile(call, encoded, memory)


class NvjpegDecoderPool:
    """The decoders of one runner. Any thread may call any method.

    It uses queues instead of locks, because a Ctrl-C cannot leave a queue locked.

    Raises NvjpegError if the GPU does not have the backend.
    """

    def __init__(
        self,
        device_stream: DeviceStream,
        library: NvjpegLibrary,
        color: str,
        backend: str,
    ) -> None:
        self._make = partial(NvjpegDecoder, device_stream, library, color, backend)
        first = self._make(second=False)
        self._decoders: list[NvjpegDecoder | None] = [first, *[None] * (_MAX_CALLS[backend] - 1)]
        self._starved = False
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._free.put(0)
        self._spare: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(1, len(self._decoders)):
            self._spare.put(place)

    def set_starved(self, starved: bool) -> None:
        """Set whether the GPU waits for decoded images. Takes effect at the next `acquire`."""
        self._starved = starved
        if starved:
            with suppress(queue.Empty):
                self._free.put(self._spare.get_nowait())

    def release_second(self) -> None:
        """Free the memory of the second decoder, unless the GPU waits for decoded images or a call uses it. `acquire`
        makes it again. May wait for the GPU."""
        if self._starved:
            return
        with suppress(queue.Empty):
            place = self._spare.get_nowait()
            try:
                decoder, self._decoders[place] = self._decoders[place], None
                if decoder is not None:
                    decoder.free()
            finally:
                self._spare.put(place)

    def decode(self, files: JpegBatch, call: GpuCall | None = None) -> Bools:
        """Decode files by a decoder that is free: see `NvjpegDecoder.decode`. Raises LoaderTimeout as `acquire` does.

        If there is no memory for the second decoder's call, that decoder is given up, and the first one decodes them.
        """
        with self.acquire() as decoder:
            try:
                return decoder.decode(files, call)
            except SystemFault as fault:
                if decoder is self._decoders[0]:
                    raise
                decoder.free()  # it may have decoded some of them
                self._give_up(self._decoders.index(decoder), str(fault))
        return self.decode(files, call)

    @contextmanager
    def acquire(self) -> Iterator[NvjpegDecoder]:
        """Acquire a decoder, once one is free. Raises LoaderTimeout if an earlier call does not end."""
        place = self._acquire_place()
        decoder = self._decoders[place]
        assert decoder is not None
        try:
            yield decoder
        finally:
            if self._decoders[place] is not None:
                self._free.put(place)

    def _acquire_place(self) -> int:
        while True:
            place = take_free(self._free, CALL_SECONDS, "nvJPEG did not end a call")
            if place == 0:
                return place
            if not self._starved:
                self._spare.put(place)
            elif self._is_made(place):
                return place

    def _is_made(self, place: int) -> bool:
        """Create the second decoder on first use: it needs as much GPU memory as the first. False if that fails."""
        if self._decoders[place] is None:
            try:
                self._decoders[place] = self._make(second=True)
            except RuntimeError as error:  # NvjpegError, or one of torch's for the stream
                self._give_up(place, str(error))
        return self._decoders[place] is not None

    def _give_up(self, place: int, reason: str) -> None:
        """Never use the decoder at this place, which is in no queue, again."""
        self._decoders[place] = None
        _LOG.warning("%s; nvJPEG decodes one call at a time, not two", reason)
