"""Binds nvJPEG's batched decode: one call decodes many images and releases the GIL.

Chroma is upsampled with libjpeg's triangle filter (NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION), which keeps the pixels
within one level of libjpeg-turbo. Source of the calls and constants: `nvjpeg.h` of CUDA 13.

On the engines a batch is not pipelined over nvJPEG's own streams (NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE): those streams
would share hardware queues with the training, and each would wait for the other (measured in
experiments/gpu_path/NOTES.md).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Ints
from gpuflow.errors import GpuflowError, MissingExtra

BACKENDS: Mapping[str, str] = MappingProxyType({"hardware": "JPEG engines", "cuda": "CUDA kernels"})
"""Names of the backends for messages, in the order in which they are tried: engines, which not every GPU has, first."""
_BACKENDS = {"hardware": 3, "cuda": 2, "cuda_few": 1}
"""NVJPEG_BACKEND_HARDWARE, _GPU_HYBRID, and _HYBRID, which leaves Huffman codes to the processor."""
_FEW_IMAGES = 50
"""Fewer images are decoded faster if one thread of the processor reads their Huffman codes: 32 ordinary photographs at
822 images/s instead of 630, 8 at 843 instead of 245 (measured in experiments/real_data/NOTES.md)."""

FORMATS = {"rgb": 5, "bgr": 6, "gray": 2}
"""NVJPEG_OUTPUT_RGBI, _BGRI (interleaved) and _Y by the decoder's color."""
_FLAG_NO_PIPELINE, _FLAG_INTERPOLATION = 1 << 0, 1 << 5
_STATUS = {
    1: "not initialized",
    2: "invalid parameter",
    3: "bad JPEG",
    4: "JPEG not supported",
    5: "allocation failed",
    6: "execution failed",
    7: "architecture mismatch",
    8: "internal error",
    9: "implementation not supported",
    10: "incomplete bitstream",
}
_OF_A_FILE, _ALLOCATION_FAILED = frozenset((3, 4, 9, 10)), 5
"""The statuses that say something of a file, and that of a lack of memory."""


def for_chunks_of(images: int, backend: str) -> str:
    """Return what `BatchedDecoder` takes for a backend of BACKENDS if at most this many images are decoded at once.

    Examples:
        >>> for_chunks_of(8, "cuda"), for_chunks_of(64, "cuda")
        ('cuda_few', 'cuda')
    """
    return "cuda_few" if backend == "cuda" and images < _FEW_IMAGES else backend


class NvjpegError(GpuflowError, RuntimeError):
    """A call of nvJPEG failed.

    Examples:
        >>> error = NvjpegError("nvjpegDecodeBatched", 3)
        >>> print(error)
        nvJPEG: nvjpegDecodeBatched returned 3 (bad JPEG)
        >>> error.is_of_a_file
        True
    """

    def __init__(self, call: str, status: int) -> None:
        self.call, self.status = call, status
        super().__init__(f"nvJPEG: {call} returned {status} ({_STATUS.get(status, 'unknown')})")

    @property
    def is_of_a_file(self) -> bool:
        """Return True if nvJPEG refuses a file, and did not fail for another reason."""
        return self.status in _OF_A_FILE

    @property
    def lacks_memory(self) -> bool:
        return self.status == _ALLOCATION_FAILED

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.call, self.status)


class NvjpegLibrary:
    """The functions of a loaded libnvjpeg. All of them release the GIL."""

    def __init__(self, path: str) -> None:
        self.path = path
        calls = ctypes.CDLL(path)
        pointer, integer = ctypes.c_void_p, ctypes.c_int

        def bind(name: str, *types: Any) -> Any:
            call = getattr(calls, f"nvjpeg{name}")
            call.argtypes = list(types)
            return call

        self.create = bind("CreateEx", integer, pointer, pointer, ctypes.c_uint, pointer)
        self.create_state = bind("JpegStateCreate", pointer, pointer)
        self.initialize = bind("DecodeBatchedInitialize", pointer, pointer, integer, integer, integer)
        self.decode = bind("DecodeBatched", *[pointer] * 6)
        self.create_parameters = bind("DecodeParamsCreate", pointer, pointer)
        self.set_format = bind("DecodeParamsSetOutputFormat", pointer, integer)
        self.set_region = bind("DecodeParamsSetROI", pointer, integer, integer, integer, integer)
        self.decode_regions = bind("DecodeBatchedEx", *[pointer] * 7)
        self.destroy_parameters = bind("DecodeParamsDestroy", pointer)
        self.destroy_state = bind("JpegStateDestroy", pointer)
        self.destroy = bind("Destroy", pointer)
        self._version = bind("GetProperty", integer, pointer)

    @property
    def version_info(self) -> tuple[int, ...]:
        """Return the version as numbers, such as (13, 3, 2)."""
        numbers = (ctypes.c_int * 3)()
        for part in range(3):
            self._version(part, ctypes.byref(numbers, part * ctypes.sizeof(ctypes.c_int)))
        return tuple(numbers)

    @property
    def version(self) -> str:
        return ".".join(map(str, self.version_info))


class BatchedDecoder:
    """One batched nvJPEG decoder, by default on the GPU's JPEG engines. Not thread-safe.

    backend: of BACKENDS, or see `for_chunks_of`.

    Raises NvjpegError if the GPU has no engines (status 7 or 9).
    """

    def __init__(self, library: NvjpegLibrary, color: str, backend: str = "hardware") -> None:
        self._library, self._format = library, FORMATS[color]
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        flags = _FLAG_INTERPOLATION | (_FLAG_NO_PIPELINE if backend == "hardware" else 0)
        status = library.create(_BACKENDS[backend], None, None, flags, ctypes.byref(self._handle))
        self._check("nvjpegCreateEx", status)
        self._check("nvjpegJpegStateCreate", library.create_state(self._handle, ctypes.byref(self._state)))
        self._parameters: list[ctypes.c_void_p] = []
        self._parameter_array: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * 0)()
        self.batch_size = 0
        """Number of images in the last call. A call with another number initializes the state again; no earlier call
        may still be running then."""

    def __del__(self) -> None:
        for parameters in getattr(self, "_parameters", ()):
            self._library.destroy_parameters(parameters)
        if getattr(self, "_state", None):
            self._library.destroy_state(self._state)
        if getattr(self, "_handle", None):
            self._library.destroy(self._handle)

    def decode(
        self,
        data: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        images: NDArray[np.uint64],
        stream: int,
        regions: Ints | None = None,
    ) -> None:
        """Queue the decoding of a batch on `stream`. The encoded bytes must stay valid until that work is done.

        With CUDA kernels, the call before must be done: they read what this call overwrites.

        Args:
            data, lengths: address in pinned host memory and size in bytes of each JPEG, [N].
            images: where each image is written, [N, 8]: four device addresses of channels, four pitches in bytes.
            stream: a cudaStream_t.
            regions: the part of each image that is written: x, y, width and height in pixels, [N, 4]; all of it by
                default. Only for the engines.

        Raises:
            NvjpegError: the call failed; any image may be the cause, and the state of every image is unknown.
        """

        def run(handle: int, state: int, form: int, *, initialize: bool) -> None:
            if initialize:
                status = self._library.initialize(handle, state, len(data), 1, form)
                self._check("nvjpegDecodeBatchedInitialize", status)
            arrays = data.ctypes.data, lengths.ctypes.data, images.ctypes.data
            if regions is None:
                self._check("nvjpegDecodeBatched", self._library.decode(handle, state, *arrays, stream))
                return
            parameters = self.parameters(len(data))
            for one, region in zip(parameters, regions.tolist(), strict=False):
                self._check("nvjpegDecodeParamsSetROI", self._library.set_region(one, *region))
            status = self._library.decode_regions(handle, state, *arrays, ctypes.addressof(parameters), stream)
            self._check("nvjpegDecodeBatchedEx", status)

        self.decode_by(run, len(data))

    def decode_by(self, run: Callable[..., None], count: int) -> None:
        """Have a function make the calls for `count` images.

        run: gets the nvjpegHandle_t, the nvjpegJpegState_t and the output format as integers, and `initialize`: whether
            the state has to be initialized first, because the last call had another number of images.
        """
        handle, state = self._handle.value, self._state.value
        try:
            run(handle, state, self._format, initialize=count != self.batch_size)
        except BaseException:
            self.batch_size = 0  # the state may be corrupt, so the next call initializes it again
            raise
        self.batch_size = count

    def parameters(self, count: int) -> ctypes.Array[ctypes.c_void_p]:
        """Return an nvjpegDecodeParams_t for each of at least `count` images, for the caller to set."""
        while len(self._parameters) < count:
            new = ctypes.c_void_p()
            self._check("nvjpegDecodeParamsCreate", self._library.create_parameters(self._handle, ctypes.byref(new)))
            self._check("nvjpegDecodeParamsSetOutputFormat", self._library.set_format(new, self._format))
            self._parameters.append(new)
        if len(self._parameter_array) < count:
            handles = [one.value for one in self._parameters]
            self._parameter_array = (ctypes.c_void_p * len(handles))(*handles)
        return self._parameter_array

    def _check(self, call: str, status: int) -> None:
        if status:
            raise NvjpegError(call, status)


def _candidates() -> Iterator[str]:
    """Yield paths to try: of pip's nvidia-nvjpeg, CUDA's folder, the system, then torchvision's CUDA wheels."""
    yield from _in_package("nvidia", "*/lib/libnvjpeg.so.*")
    yield from map(str, sorted(Path("/usr/local/cuda").glob("targets/*/lib/libnvjpeg.so.1?")))
    if system := ctypes.util.find_library("nvjpeg"):
        yield system
    yield from _in_package("torchvision", "../torchvision.libs/libnvjpeg.*")


def _in_package(package: str, pattern: str) -> list[str]:
    """Return the files that a pattern finds in a package's folders, without importing it; none if it is missing."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return [str(path) for folder in folders or () for path in sorted(Path(folder).glob(pattern))]


@cache
def find_nvjpeg() -> NvjpegLibrary:
    """Return the first libnvjpeg that loads. Raises MissingExtra if there is none."""
    for path in _candidates():
        try:
            return NvjpegLibrary(path)
        except (OSError, AttributeError):
            continue
    raise MissingExtra("decoding on the GPU", "libnvjpeg", "gpu")
