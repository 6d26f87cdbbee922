"""Finds libjpeg-turbo, and binds the functions of native/jpeg.c, which decode a JPEG or a region of it into a buffer.

OpenCV decodes whole images. A random crop needs half of an image on average, and libjpeg-turbo can skip the inverse
transform, the upsampling and the colour conversion of the rest. If no library can be used, OpenCV decodes everything
and the pixels are the same.

Wheels of Pillow, which torchvision requires, carry libjpeg-turbo. Where Pillow is a distribution's package, the
system's libjpeg is tried.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import cv2
import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.header import TEST_JPEG
from gpuflow.native.library import INTEGER, POINTER, function

PIXEL_FORMATS = {"rgb": 0, "bgr": 1, "gray": 2}
"""The values of jpeg_color in native/jpeg.h."""
OPENCV_COST = "crops of JPEGs take 1.3 times as long, small ones of large photographs 4 times"
"""What decoding whole images costs, against the regions that crops need (measured on 500x375 and 3000x2000 pixels)."""
REMEDY = "pip install --force-reinstall 'pillow>=10.4', whose wheel has libjpeg-turbo, and preload no other libjpeg"
"""What to do if no libjpeg-turbo can be used."""
_DONE, _NO_MEMORY = 0, 1
"""Values of native/image.h."""
_SYSTEM = "libjpeg.so.62"
_Region, _int = INTEGER * 4, ctypes.c_int

_open = function("gpuflow_open_jpeg", ctypes.c_char_p, ctypes.c_char_p, INTEGER, result=_int)
_decode = function(
    "gpuflow_decode_jpeg", POINTER, INTEGER, _int, INTEGER, INTEGER, _Region, POINTER, INTEGER, POINTER, result=_int
)
_accept = function("gpuflow_accept_jpeg", POINTER, INTEGER, INTEGER, INTEGER, result=_int)


class LibjpegTurbo:
    """The libjpeg-turbo that this process has opened. Any thread may call `decode`, which keeps no state between calls.

    Raises:
        OSError: the library at this path cannot be used, or the process has opened another one.
    """

    def __init__(self, path: str) -> None:
        text = ctypes.create_string_buffer(1024)
        opened = _open(path.encode(), text, len(text))
        found = text.value.decode()
        if not opened:
            raise OSError(f"{path}: {found.removeprefix(f'{path}: ')}")
        self.path, self.version = found, _version(found)

    def decode(
        self,
        data: Bytes,
        color: str,
        size: tuple[int, int],
        region: tuple[int, int, int, int] | None,
        buffer: Bytes,
    ) -> Bytes | None:
        """Decode a JPEG, or the region (y, x, height, width) of it, into `buffer`.

        The region's pixels equal those of the whole image, bit for bit.

        Args:
            data: the encoded bytes, uint8 [n].
            color: one of PIXEL_FORMATS.
            size: (height, width) in the file's header.
            buffer: uint8, large enough for the pixels of the region.

        Returns:
            uint8 [height, width, C], a view of `buffer`. None if libjpeg-turbo gives an error or a warning, or finds
            another size; the content of `buffer` is then undefined.

        Raises:
            MemoryError: there is not enough memory for the coefficients.
        """
        y, x, height, width = region or (0, 0, *size)
        pitch = width * (1 if color == "gray" else 3)
        pixels = buffer[: height * pitch]
        status = _decode(
            data.ctypes.data,
            data.size,
            PIXEL_FORMATS[color],
            *size,
            _Region(y, x, height, width),
            pixels.ctypes.data,
            pitch,
            None,
        )
        return pixels.reshape(height, width, -1) if _is_done(status) else None

    def accepts(self, data: Bytes, size: tuple[int, int]) -> bool:
        """Return True if a whole JPEG of this (height, width) decodes without an error or a warning.

        It takes two thirds of the time of `decode`, because it decodes only luma, at an eighth of the size.
        """
        return _is_done(_accept(data.ctypes.data, data.size, *size))


def _is_done(status: int) -> bool:
    if status == _NO_MEMORY:
        raise MemoryError("not enough memory to decode a JPEG of several scans")
    return status == _DONE


def _version(path: str) -> str:
    """Return the version in the library's file, because no function of libjpeg returns it; empty if unknown."""
    text = re.search(rb"libjpeg-turbo version (\d+\.\d+[\w.]*)", Path(path).read_bytes())
    return text[1].decode() if text else ""


def _bundled() -> list[str]:
    """Return the paths of the libjpeg in Pillow's wheel; none for another package of Pillow."""
    try:
        files = metadata.files("pillow") or []
    except metadata.PackageNotFoundError:
        files = []
    return [str(file.locate()) for file in files if file.name.startswith("libjpeg")]


def _passes(library: LibjpegTurbo) -> bool:
    """Return True if a region of gpuflow's own test image, decoded by this library, equals OpenCV's pixels."""
    whole = np.asarray(cv2.imdecode(TEST_JPEG, cv2.IMREAD_COLOR_BGR))
    part = library.decode(TEST_JPEG, "bgr", whole.shape[:2], (9, 19, 21, 17), np.empty(whole.size, np.uint8))
    return part is not None and np.array_equal(part, whole[9:30, 19:36])


@cache
def _search() -> tuple[LibjpegTurbo | None, str]:
    """Return the first library that can be opened; or None and why there is none."""
    bundled = _bundled()
    refusals = [] if bundled else ["this package of Pillow has no libjpeg"]
    for path in (*bundled, _SYSTEM):
        try:
            library = LibjpegTurbo(path)
        except OSError as error:
            refusals.append(str(error))
            continue
        return (library, "") if _passes(library) else (None, f"{path}: its pixels are not those of OpenCV")
    return None, "; ".join(refusals)


def find_libjpeg_turbo() -> LibjpegTurbo | None:
    """Return the libjpeg-turbo of release 3.0 or later that decodes in this process; None if OpenCV decodes instead."""
    return _search()[0]


def libjpeg_turbo_refusal() -> str:
    """Return why no libjpeg-turbo can be used; empty if one is."""
    return _search()[1]
