"""Decodes the formats that `decode.formats` must name, with Pillow, pillow-heif and pylibjxl.

The extra `formats` installs them. They are imported where they are used, so that nothing else needs them.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.header import UNSUPPORTED, Header, refuse, require_memory
from gpuflow.decode.optional_headers import LABELS
from gpuflow.errors import BadSampleError, MissingExtra, is_system_fault, reason_of

_EXTRA = "formats"
_OLDEST_PILLOW = 12
"""Older ones turn a TIFF by its XMP data, and have no AVIF or a decoder of it that can crash."""
_PILLOW_LACKS_MEMORY = ("out of memory", "decoder error -9")
"""How the texts of Pillow's OSErrors for its codecs' status -9 begin; they have no errno."""
_INTERPRETATION_TAG, _WHITE_IS_ZERO = 0x0106, 0
"""A TIFF's photometric interpretation, and its value in gray files whose level 0 is white."""
_Decoder = Callable[[bytes, Header, bool], Bytes]
"""Decodes bytes with this header, with alpha or without."""


def decode_optional(data: Bytes, header: Header, *, alpha: bool) -> Bytes:
    """Decode a file whose header passed `codecs.probe`, as its library gives it: turned by `header.turned`.

    Returns:
        Gray, RGB or, if asked for and present, RGBA: uint8 [H, W, C]. Levels of 16 bits are their upper 8 bits.

    Raises:
        BadSampleError: the library refused the file. MissingExtra: the library is not installed. MemoryError: there is
            not enough memory for the image.
    """
    try:
        image = _DECODERS[header.format](data.tobytes(), header, alpha)
    except (BadSampleError, MissingExtra):
        raise
    except Exception as error:  # Pillow's parsers raise SyntaxError, struct.error, EOFError and others
        if is_system_fault(error):
            raise
        reason = reason_of(error)
        if isinstance(error, OSError) and reason.startswith(_PILLOW_LACKS_MEMORY):
            raise MemoryError(f"not enough memory to decode {LABELS[header.format]}") from error
        require_memory(header)
        refuse(f"the {LABELS[header.format]} decoder gave up: {reason}")
    _require_size(header, *image.shape[:2])
    return image


def _require_size(header: Header, height: int, width: int) -> None:
    """Raise BadSampleError if a library reads another size from a file than gpuflow, which checked it."""
    if (height, width) != header.decoded_size:
        rows, columns = header.decoded_size
        refuse(f"damaged header: two sizes, {columns}x{rows} and {width}x{height} pixels")


def missing_library(names: Sequence[str]) -> MissingExtra | None:
    """Return what must be installed before these formats of `decode.formats` are decoded; None if nothing."""
    for name in names:
        try:
            if name in _LIBRARIES:
                _LIBRARIES[name]()
        except MissingExtra as error:
            return error
    return None


# --- Pillow -----------------------------------------------------------------------------------------------------------


def _pillow(name: str, prefix: str) -> Callable[[], Any]:
    """Return a function that imports one of Pillow's classes of files, which reads one format, unlike Image.open."""

    def load() -> Any:
        import importlib

        import PIL

        if int(PIL.__version__.partition(".")[0]) < _OLDEST_PILLOW:
            raise MissingExtra(f"decoding {LABELS[name]}", f"Pillow {_OLDEST_PILLOW} or newer", _EXTRA)
        module: Any = importlib.import_module(f"PIL.{prefix}ImagePlugin")
        if not getattr(module, "SUPPORTED", True):
            raise MissingExtra(f"decoding {LABELS[name]}", "a Pillow that was built with it", _EXTRA)
        if name == "avif" and not module.DEFAULT_MAX_THREADS:
            module.DEFAULT_MAX_THREADS = 1  # gpuflow's threads decode several images at a time
        return getattr(module, f"{prefix}ImageFile")

    return load


def _by_pillow(name: str) -> _Decoder:
    def decode(data: bytes, header: Header, alpha: bool) -> Bytes:
        with _LIBRARIES[name]()(io.BytesIO(data)) as image:
            _require_size(header, image.height, image.width)  # before it allocates the image
            for key in ("xmp", "XML:com.adobe.xmp"):
                image.info.pop(key, None)  # else Pillow turns a TIFF by its XMP data
            image.load()
            return _levels(image, alpha)

    return decode


def _levels(image: Any, alpha: bool) -> Bytes:
    """Return the pixels of a loaded Pillow image as `decode_optional` returns them."""
    if image.mode.startswith("I;16"):
        levels = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)[..., None]
        white_is_zero = image.format == "TIFF" and image.tag_v2.get(_INTERPRETATION_TAG) == _WHITE_IS_ZERO
        return 255 - levels if white_is_zero else levels  # Pillow inverts only levels of up to 8 bits
    if image.mode in ("I", "F", "LAB", "HSV"):
        refuse(f"pixels of Pillow's mode {image.mode}, which have no 8-bit levels; convert this image", UNSUPPORTED)
    opaque = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    mode = "RGBA" if alpha and image.has_transparency_data else opaque
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]


# --- pillow-heif ------------------------------------------------------------------------------------------------------


def _pillow_heif() -> Any:
    try:
        import pillow_heif
    except ImportError as error:
        raise MissingExtra("decoding HEIC", "pillow-heif", _EXTRA) from error
    if pillow_heif.options.DECODE_THREADS == _HEIF_THREADS:
        pillow_heif.options.DECODE_THREADS = 1  # gpuflow's threads decode several images at a time
    return pillow_heif


_HEIF_THREADS = 4
"""The number of threads that pillow-heif starts for each image unless the program chose another one."""


def _by_pillow_heif(data: bytes, header: Header, alpha: bool) -> Bytes:
    file = _pillow_heif().open_heif(io.BytesIO(data))
    _require_size(header, file.size[1], file.size[0])
    return _levels(file.to_pillow(), alpha)


# --- pylibjxl ---------------------------------------------------------------------------------------------------------


def _pylibjxl() -> Any:
    try:
        import pylibjxl
    except ImportError as error:
        raise MissingExtra("decoding JPEG XL", "pylibjxl", _EXTRA) from error
    return pylibjxl


_own = threading.local()


def _by_pylibjxl(data: bytes, header: Header, alpha: bool) -> Bytes:
    """Decode a JPEG XL. libjxl converts levels of any depth to 8 bits, rounded."""
    found = _pylibjxl().probe(data)
    _require_size(header, found["height"], found["width"])
    if not hasattr(_own, "jxl"):
        _own.jxl = _pylibjxl().JXL(threads=1, pool_size=1)
    pixels = np.asarray(_own.jxl.decode(data), np.uint8)
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    channels = pixels.shape[2]
    if channels == 2 and alpha:
        return np.ascontiguousarray(pixels[..., [0, 0, 0, 1]])
    return pixels if channels in (1, 3) or alpha else np.ascontiguousarray(pixels[..., : channels - 1])


_PILLOW = {"tiff": "Tiff", "gif": "Gif", "avif": "Avif", "jp2": "Jpeg2K", "webp_animated": "WebP"}
"""The formats that Pillow decodes, and how the names of their modules and classes begin."""
_LIBRARIES: dict[str, Callable[[], Any]] = {
    **{name: _pillow(name, prefix) for name, prefix in _PILLOW.items()},
    "heic": _pillow_heif,
    "jxl": _pylibjxl,
}
"""What imports the library of each format. OpenCV, which is always there, decodes a PNG of 16 bits."""

_DECODERS: dict[str, _Decoder] = {
    **{name: _by_pillow(name) for name in _PILLOW},
    "heic": _by_pillow_heif,
    "jxl": _by_pylibjxl,
}
