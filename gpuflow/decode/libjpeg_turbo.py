"""Binds the TurboJPEG 3 functions that decode a JPEG, or a region of it, into a given buffer.

OpenCV decodes whole images. A random crop needs half of an image on average, and libjpeg-turbo can skip the inverse
transform, the upsampling and the colour conversion of the rest. The library is optional: if it is missing or fails its
self-test, OpenCV decodes everything and the pixels are the same.

libjpeg-turbo's decompressor keeps tables and state from one file to the next, so a damaged file can change the result
of the next file. Here each file gets a new decompressor (0.7 us), and a file counts as decoded only if there was no
error and no warning.

The library is searched in the wheel `pylibjxl` (`pip install gpuflow[turbo]`), then on the system's path.
Source of the calls and constants: libjpeg-turbo's `turbojpeg.h`, version 3.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

__all__ = ["PIXEL_FORMATS", "LibjpegTurbo", "find_libjpeg_turbo"]

PIXEL_FORMATS = {"rgb": 0, "bgr": 1, "gray": 6}
_BLOCK_WIDTHS = {0: 8, 1: 16, 2: 16, 3: 8, 4: 8, 5: 32, 6: 8}
"""Width in pixels of an interleaved block for each TJSAMP value: 4:4:4, 4:2:2, 4:2:0, gray, 4:4:0, 4:1:1, 4:4:1."""
_INIT_DECOMPRESS = 1
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT = 0, 4, 5, 6
"""TJPARAM values."""
_MIN_VERSION = (3, 0)
"""Earlier releases are not used, nor are the betas of 3.0 (2.1.90 and later)."""


class _Region(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int), ("width", ctypes.c_int), ("height", ctypes.c_int)]


class _Scale(ctypes.Structure):
    _fields_ = [("numerator", ctypes.c_int), ("denominator", ctypes.c_int)]


_EIGHTH = _Scale(1, 8)


class LibjpegTurbo:
    """A loaded libjpeg-turbo library. Any thread may call `decode`, which keeps no state between calls.

    Raises:
        OSError: there is no library at this path. AttributeError: it lacks TurboJPEG 3's functions.
    """

    def __init__(self, path: str) -> None:
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        # CDLL releases the GIL during a call; PyDLL holds it, which is cheaper for calls of a microsecond.
        free, held = ctypes.CDLL(path), ctypes.PyDLL(path)
        self.path, self.version = path, _version(path)
        self._decompress = free.tj3Decompress8
        self._decompress.argtypes = [pointer, pointer, size, pointer, integer, integer]
        self._init, self._destroy = held.tj3Init, held.tj3Destroy
        self._init.argtypes, self._init.restype = [integer], pointer
        self._destroy.argtypes, self._destroy.restype = [pointer], None
        self._set, self._get = held.tj3Set, held.tj3Get
        self._set.argtypes, self._get.argtypes = [pointer, integer, integer], [pointer, integer]
        self._header, self._set_region = held.tj3DecompressHeader, held.tj3SetCroppingRegion
        self._header.argtypes = [pointer, pointer, size]
        self._set_region.argtypes = [pointer, _Region]
        self._set_scale = held.tj3SetScalingFactor
        self._set_scale.argtypes = [pointer, _Scale]

    def decode(
        self,
        data: NDArray[np.uint8],
        color: str,
        size: tuple[int, int],
        region: tuple[int, int, int, int] | None,
        buffer: NDArray[np.uint8],
    ) -> NDArray[np.uint8] | None:
        """Decode a JPEG, or the region (y, x, height, width) of it, into `buffer`.

        The region is decoded together with one block to its left and right, because interpolated chroma needs its
        neighbours, and then cut to size: its pixels equal those of the whole image, bit for bit.

        Args:
            data: the encoded bytes, uint8 [n].
            color: one of PIXEL_FORMATS.
            size: (height, width) in the file's header.
            buffer: uint8, large enough for all pixels of that size.

        Returns:
            uint8 [height, width, C], a view of `buffer`. None if libjpeg-turbo gives an error or a warning, finds
            another size, or cannot decode the subsampling; the content of `buffer` is then undefined.
        """
        handle = self._init(_INIT_DECOMPRESS)
        if not handle:
            raise MemoryError("tj3Init returned no decompressor")
        try:
            encoded = data.ctypes.data
            self._set(handle, _STOP_ON_WARNING, 1)
            if self._header(handle, encoded, data.size):
                return None
            if (self._get(handle, _HEIGHT), self._get(handle, _WIDTH)) != size:
                return None  # the buffer may be too small for this size
            block = _BLOCK_WIDTHS.get(self._get(handle, _SUBSAMPLING))
            if block is None:
                return None
            y, x, height, width = region or (0, 0, *size)
            left, right = max(x - block, 0) // block * block, min(x + width + block, size[1])
            if region is not None and self._set_region(handle, _Region(left, y, right - left, height)):
                return None
            pitch = (right - left) * (1 if color == "gray" else 3)
            if self._decompress(handle, encoded, data.size, buffer.ctypes.data, pitch, PIXEL_FORMATS[color]):
                return None
        finally:
            self._destroy(handle)
        image = buffer[: height * pitch].reshape(height, right - left, -1)
        return image[:, x - left : x - left + width]

    def accepts(self, data: NDArray[np.uint8], size: tuple[int, int]) -> bool:
        """Whether a whole JPEG of this (height, width) decodes without an error or a warning. Returns no pixels.

        It takes two thirds of the time of `decode`, because it decodes only luma, at an eighth of the size.
        """
        handle = self._init(_INIT_DECOMPRESS)
        if not handle:
            raise MemoryError("tj3Init returned no decompressor")
        try:
            encoded, (height, width) = data.ctypes.data, size
            self._set(handle, _STOP_ON_WARNING, 1)
            if self._header(handle, encoded, data.size) or self._set_scale(handle, _EIGHTH):
                return False
            if (self._get(handle, _HEIGHT), self._get(handle, _WIDTH)) != size:
                return False
            pitch = -(-width // 8)
            buffer = np.empty(-(-height // 8) * pitch, np.uint8)
            status = self._decompress(handle, encoded, data.size, buffer.ctypes.data, pitch, PIXEL_FORMATS["gray"])
        finally:
            self._destroy(handle)
        return bool(status == 0)


def _version(path: str) -> str:
    """The library's version, empty if unknown. No function returns it, so it is read from the library's file."""
    try:
        text = re.search(rb"version (\d+\.\d+[\w.]*) \(build \d+\)", Path(path).read_bytes())
    except OSError:
        text = None
    return text[1].decode() if text else ""


def _is_current(version: str) -> bool:
    numbers = re.findall(r"\d+", version)
    return tuple(map(int, numbers[:2])) >= _MIN_VERSION


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("pylibjxl")
    if spec is not None and spec.origin is not None:
        yield from map(str, sorted(Path(spec.origin).parent.glob("_pylibjxl*.so")))
    if system := ctypes.util.find_library("turbojpeg"):
        with suppress(OSError):
            ctypes.CDLL(system)  # loads it, so that its path appears in /proc/self/maps
        yield from (path for path in _loaded_files() if Path(path).name.startswith("libturbojpeg"))


def _loaded_files() -> set[str]:
    """The paths of the files that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line[line.index("/") :] for line in lines if "/" in line}


def _passes(library: LibjpegTurbo) -> bool:
    """Whether a region of a small image, decoded by this library, equals OpenCV's pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    data = cv2.imencode(".jpg", cv2.blur(pixels, (5, 5)))[1].reshape(-1)
    whole = np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR_BGR))
    part = library.decode(data, "bgr", (40, 56), (9, 19, 21, 17), np.empty(whole.size, np.uint8))
    return part is not None and np.array_equal(part, whole[9:30, 19:36])


@lru_cache(maxsize=1)
def find_libjpeg_turbo() -> LibjpegTurbo | None:
    """The first library of release 3.0 or later that passes its self-test, or None."""
    for path in _candidates():
        try:
            library = LibjpegTurbo(path)
        except (OSError, AttributeError):
            continue
        if _is_current(library.version) and _passes(library):
            return library
    return None
