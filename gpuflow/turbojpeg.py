"""A typed binding of the few TurboJPEG 3 calls that decode a region of a JPEG into memory of ours.

OpenCV decodes whole images. A random crop needs half of one on average, and libjpeg-turbo can leave out the inverse
transform, the upsampling and the colour conversion of the rest. The library is optional: where there is none, or one
that fails its self-test, OpenCV decodes everything and the pixels are the same.

It is looked for in the wheel `turbojpeg` (`pip install gpuflow[turbo]`), then on the system's path.
Source of the calls and constants: libjpeg-turbo's `turbojpeg.h`, version 3.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError

__all__ = ["PIXEL_FORMATS", "Library", "TurboJpeg", "find_library"]

PIXEL_FORMATS = {"rgb": 0, "bgr": 1, "gray": 6}
_BLOCK_WIDTHS = {0: 8, 1: 16, 2: 16, 3: 8, 4: 8, 5: 32, 6: 8}
"""Width in pixels of an interleaved block for each TJSAMP value: 4:4:4, 4:2:2, 4:2:0, gray, 4:4:0, 4:1:1, 4:4:1."""
_INIT_DECOMPRESS, _PARAM_SUBSAMPLING, _PARAM_WIDTH, _PARAM_HEIGHT, _ERROR_WARNING = 1, 4, 5, 6, 0


class _Region(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int), ("width", ctypes.c_int), ("height", ctypes.c_int)]


_WHOLE = _Region(0, 0, 0, 0)


class Library:
    """One libturbojpeg: its functions. `decompress` releases the GIL; the others take a microsecond and keep it."""

    def __init__(self, path: str) -> None:
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        free, held = ctypes.CDLL(path), ctypes.PyDLL(path)
        self.path, self.version = path, _version(path)
        self.decompress = free.tj3Decompress8
        self.decompress.argtypes = [pointer, pointer, size, pointer, integer, integer]
        self.init, self.destroy = held.tj3Init, held.tj3Destroy
        self.init.argtypes, self.init.restype = [integer], pointer
        self.destroy.argtypes, self.destroy.restype = [pointer], None
        self.header, self.get, self.set_region = held.tj3DecompressHeader, held.tj3Get, held.tj3SetCroppingRegion
        self.header.argtypes = [pointer, pointer, size]
        self.get.argtypes = [pointer, integer]
        self.set_region.argtypes = [pointer, _Region]
        self.error_code, self.error_text = held.tj3GetErrorCode, held.tj3GetErrorStr
        self.error_code.argtypes = self.error_text.argtypes = [pointer]
        self.error_text.restype = ctypes.c_char_p


class TurboJpeg:
    """One decompressor. Not for two threads at once."""

    def __init__(self, calls: Library) -> None:
        self._calls = calls
        self._handle = calls.init(_INIT_DECOMPRESS)
        if not self._handle:
            raise MemoryError("tj3Init returned no decompressor")

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._calls.destroy(handle)

    def decode(
        self,
        data: NDArray[np.uint8],
        color: str,
        height: int,
        width: int,
        region: tuple[int, int, int, int] | None,
        buffer: NDArray[np.uint8],
    ) -> NDArray[np.uint8] | None:
        """Decode a JPEG, or the region (y, x, height, width) of it, into `buffer`.

        The region is decoded with one block to the left and right of it, because interpolated chroma there needs its
        neighbours, and then cut to size: the pixels are those of the whole image, bit for bit.

        Returns:
            uint8 [height, width, C] on `buffer`, or None where this library cannot decode the file's subsampling.

        Raises:
            BadSampleError: libjpeg-turbo gave up. What it only warns about passes, as it does in OpenCV and PIL.
        """
        calls, handle, address = self._calls, self._handle, data.ctypes.data
        if calls.header(handle, address, data.size) < 0 and calls.error_code(handle) != _ERROR_WARNING:
            raise BadSampleError("decode", self._error())
        size = calls.get(handle, _PARAM_HEIGHT), calls.get(handle, _PARAM_WIDTH)
        if size != (height, width):  # two readers of one header; `buffer` has room for ours
            raise BadSampleError(
                "decode", f"damaged header: two sizes, {width}x{height} and {size[1]}x{size[0]} pixels"
            )
        block = _BLOCK_WIDTHS.get(calls.get(handle, _PARAM_SUBSAMPLING))
        if block is None:
            return None
        y, x, box_height, box_width = region or (0, 0, height, width)
        left, right = 0, width
        if region is not None:
            left = max(x - block, 0) // block * block
            right = min(x + box_width + block, width)
            if calls.set_region(handle, _Region(left, y, right - left, box_height)) < 0:
                raise BadSampleError("decode", self._error())
        channels = 1 if color == "gray" else 3
        pitch = (right - left) * channels
        status = calls.decompress(handle, address, data.size, buffer.ctypes.data, pitch, PIXEL_FORMATS[color])
        fatal = status < 0 and calls.error_code(handle) != _ERROR_WARNING
        error = self._error() if fatal else ""
        if region is not None:
            calls.set_region(handle, _WHOLE)
        if fatal and region is not None:
            # The file is damaged, or its sampling factors are larger than its subsampling needs, as in 2x1, 2x1, 2x1:
            # there the library finds no place to begin the region at.
            whole = self.decode(data, color, height, width, None, buffer)
            return None if whole is None else whole[y : y + box_height, x : x + box_width]
        if fatal:
            raise BadSampleError("decode", error)
        image = buffer[: box_height * pitch].reshape(box_height, right - left, channels)
        return image[:, x - left : x - left + box_width]

    def _error(self) -> str:
        return str(self._calls.error_text(self._handle).decode(errors="replace"))


def _version(path: str) -> str:
    """The library's version; it has no call for that, but the text stands in the file."""
    try:
        text = re.search(rb"libjpeg-turbo version (\d[\w.]*)", Path(path).read_bytes())
    except OSError:  # a bare name that the system's loader resolves
        text = None
    return text[1].decode() if text else "3, of unknown release"


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("turbojpeg")
    if spec is not None and spec.origin is not None:
        yield from map(str, sorted(Path(spec.origin).parent.glob("turbojpeg.libs/libturbojpeg*")))
    if system := ctypes.util.find_library("turbojpeg"):
        yield system


def _passes(calls: Library) -> bool:
    """Whether a region of a small image, decoded by this library, equals OpenCV's pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    data = cv2.imencode(".jpg", cv2.blur(pixels, (5, 5)))[1].reshape(-1)
    whole = np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR_BGR))
    buffer = np.empty(whole.size, np.uint8)
    part = TurboJpeg(calls).decode(data, "bgr", 40, 56, (9, 19, 21, 17), buffer)
    return part is not None and np.array_equal(part, whole[9:30, 19:36])


@lru_cache(maxsize=1)
def find_library() -> Library | None:
    """The first library of version 3 that passes its self-test, or None."""
    for path in _candidates():
        try:
            calls = Library(path)
            if _passes(calls):
                return calls
        except (OSError, AttributeError, BadSampleError):
            continue
    return None
