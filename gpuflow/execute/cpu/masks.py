"""Reads masks as pixels, uint8 [H, W], and moves them as a program moves images.

Masks are encoded images, or polygons and run lengths as pycocotools gives them. They follow a program's steps without
interpolation. A resampling step moves a mask move by move, as torchvision v2 does. A warp step samples it once, at the
points that the image is sampled at. What a step fills in, such as a constant border, has one level in a mask, by
default 0.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Bytes, Ints
from gpuflow.decode.codecs import format_of
from gpuflow.decode.header import SWAPPED, stored
from gpuflow.decode.optional_formats import missing_library
from gpuflow.errors import is_system_fault
from gpuflow.execute.warp import BORDERS
from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    ResamplingStep,
    Warping,
    WarpStep,
)
from gpuflow.pipeline.records import MaskFile, Polygons, Rle
from gpuflow.pipeline.targets import moves_of_stages

if TYPE_CHECKING:
    from PIL import ImageFile

Instance = Polygons | Rle | Bytes
"""The mask of one instance; pixels are 0 and 1."""
_FARTHEST = 2**20
"""The largest coordinate of an outline, in pixels. The time to draw an edge grows with its length."""
_PILLOW = {"png": "PNG", "bmp": "BMP", "gif": "GIF", "jpeg": "JPEG", "pnm": "PPM", "tiff": "TIFF"}
"""Pillow's names of the formats that a mask may have."""
_BITS_TAG, _ORIENTATION_TAG = 0x0102, 0x0112
_draw_outline = function("gpuflow_draw_outline", POINTER, INTEGER, INTEGER, INTEGER, INTEGER, POINTER, result=INTEGER)
_FULL, _TOP_LEVELS = 255, {2: 3, 4: 15}
"""The highest level of 8 bits, and of fewer bits."""


def decode_mask(
    mask: MaskFile | Bytes, size: tuple[int, int], formats: Sequence[str] = (), *, upright: bool = False
) -> Bytes:
    """Return the levels of a mask, uint8 [height, width], with 0 for black as in Pillow; of a palette, its indices.

    A file must be a PNG by its content. No other decoder of Pillow reads it.

    formats: what a file may be besides, as `FieldSpec.formats` names it.
    upright: apply the Orientation tag of a TIFF, as `decode: {orientation: apply}` does for images.

    Raises ValueError if it is of another format, has not one 8-bit channel, or is not of this size; MissingExtra if
    Pillow is too old for TIFF; and faults of the environment.
    """
    if isinstance(mask, np.ndarray):
        if mask.shape != size:
            raise ValueError(_other_size(mask.shape, size))
        return mask
    if "tiff" in formats and (missing := missing_library(["tiff"])) is not None:
        raise missing
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(mask.data), formats=[_PILLOW[name] for name in ("png", *formats)]) as image:
            turned, top = _orientation(image), _top_level(image, mask.data)
            mode, found = image.mode, image.size[::-1]
            if turned >= SWAPPED and not upright:
                found = found[::-1]
            if mode in ("L", "P", "1") and found == size:
                levels = np.asarray(image, np.uint8)
                if turned != 1 and not upright:
                    levels = stored(levels[..., None], turned)[..., 0]
                return levels if top == _FULL else _rescaled(levels, top)
    except UnidentifiedImageError:
        raise ValueError(_unreadable(mask.data, formats)) from None
    except Exception as error:  # Pillow's readers raise many kinds, such as SyntaxError and DecompressionBombError
        if is_system_fault(error):
            raise
        raise ValueError(f"cannot be decoded: {error}") from error
    if mode not in ("L", "P", "1"):
        raise ValueError(f"must have one channel of 8 bits, got an image of mode {mode}")
    raise ValueError(_other_size(found, size))


def _unreadable(data: bytes, formats: Sequence[str]) -> str:
    """Return why Pillow finds none of the allowed formats in a file, and what to do."""
    name, label = format_of(memoryview(data))
    if name in ("png", *formats):
        return f"cannot be decoded: the header of the {label} is damaged"
    action = f"name it in the field's formats: [{name}], or " if name in _PILLOW else ""
    return f"must be a PNG, got {label or f'bytes that begin with {data[:4]!r}'}; {action}convert it to PNG"


def _orientation(image: ImageFile.ImageFile) -> int:
    """Return the orientation that Pillow applies to an image: the Orientation tag of a TIFF, 1 for other files.

    Removes XMP data, whose orientation Pillow would apply to a TIFF without that tag.
    """
    for key in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(key, None)
    if image.format != "TIFF":
        return 1
    orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    return orientation if orientation in range(1, 9) else 1


def _rescaled(levels: Bytes, top: int) -> Bytes:
    """Return levels of 0 to 255 as levels of 0 to `top`, rounded to the nearest."""
    return ((levels.astype(np.uint16) * top + _FULL // 2) // _FULL).astype(np.uint8)


def _top_level(image: ImageFile.ImageFile, data: bytes) -> int:
    """Return the gray level of a file that Pillow converts to 255. It converts the others in proportion.

    It does so with the levels of PNGs and TIFFs that have 2 or 4 bits, and of PGMs with another highest value than 255.
    """
    if image.mode != "L":
        return _FULL
    if image.format == "PNG":
        return _TOP_LEVELS.get(data[24], _FULL)  # of IHDR, the first chunk (PNG specification, 11.2.1)
    if image.format == "TIFF":
        return _TOP_LEVELS.get(image.getexif().get(_BITS_TAG, 1), _FULL)
    if image.format != "PPM":
        return _FULL
    codec, _, start, options = image.tile[0]
    if not isinstance(options, tuple):  # Pillow reads the levels as they are
        return _FULL
    top = int(options[1])
    if codec == "ppm" and (highest := max(data[start : start + image.width * image.height], default=0)) > top:
        raise ValueError(f"levels must be at most {top}, the highest value in its header, got {highest}; correct it")
    return top


def _other_size(got: tuple[int, ...], size: tuple[int, int]) -> str:
    return f"has {got[0]}x{got[1]} pixels, and its image {size[0]}x{size[1]}"


def mask_fault(mask: Instance, size: tuple[int, int]) -> str | None:
    """Return why an instance's mask does not belong to an image of this size; None if it does.

    Examples:
        >>> mask_fault(np.zeros((2, 3), np.uint8), size=(3, 2))
        'has 2x3 pixels, and its image 3x2'
    """
    if isinstance(mask, np.ndarray):
        return None if mask.shape == size else _other_size(mask.shape, size)
    if isinstance(mask, Rle):
        if mask.size != size:
            return _other_size(mask.size, size)
        if not mask.fills:
            return f"has run lengths that do not add up to {size[0]}x{size[1]} pixels"
    elif not all(np.isfinite(outline).all() for outline in mask.outlines):
        return "must have finite coordinates"
    elif any(np.abs(outline).max(initial=0) > _FARTHEST for outline in mask.outlines):
        return f"must have coordinates of at most {_FARTHEST} pixels"
    return None


def draw_instance(mask: Instance, bit: int, down: Bytes) -> None:
    """Set a bit of the pixels of one instance, of polygons by pycocotools' rules (rleFrPoly).

    down [width, height]: its pixels column by column, without gaps.
    """
    if isinstance(mask, np.ndarray):
        down |= mask.T << bit
        return
    width, height = down.shape
    if isinstance(mask, Rle):
        levels = (np.arange(len(mask.counts)) % 2).astype(np.uint8) << bit
        down |= np.repeat(levels, mask.counts).reshape(width, height)
        return
    for outline in mask.outlines:
        points = np.ascontiguousarray(outline)
        if _draw_outline(points.ctypes.data, len(points), width, height, 1 << bit, down.ctypes.data):
            raise MemoryError(f"no memory to draw an outline of {len(points)} points")


_apply = function("gpuflow_apply_mask_map", POINTER, POINTER, INTEGER, POINTER)
_warp = function("gpuflow_warp_mask_map", POINTER, POINTER, INTEGER, INTEGER, POINTER, INTEGER, INTEGER, POINTER)
_KINDS = {np.int32: 1, np.int64: 2}
"""Numbers of the types of places, as in mask.c."""
_MOST_IN_INT32 = 2**31


class MaskMap:
    """Maps each pixel of the result to the pixel of one sample's mask that it shows.

    Crops, flips, resizes and pads move rows and columns separately, so two vectors describe them: the row of each row,
    and the column of each column. A warp makes a place for each pixel, its number in the mask, and of these places two
    vectors choose again. A negative row, column or place lies outside the mask.

    Examples:
        >>> flipped = MaskMap(1, 3)
        >>> flipped.move(s.Flip(np.array([True]), np.array([False])), 0)
        >>> flipped.apply(np.array([[1, 0, 2]], np.uint8)).tolist()
        [[2, 0, 1]]
    """

    def __init__(self, height: int, width: int) -> None:
        self._rows, self._columns = np.arange(height), np.arange(width)
        self._width = width
        self._places: NDArray[np.int32 | np.int64] | None = None
        self._number: type[np.int32 | np.int64] = np.int32 if height * width < _MOST_IN_INT32 else np.int64

    def apply(self, mask: Bytes, fill: int = 0) -> Bytes:
        """Return the result of a mask [h, w]. fill: its level outside the mask."""
        mask, described = np.ascontiguousarray(mask), self._described()
        result = np.empty((len(self._rows), len(self._columns)), np.uint8)
        _apply(described.ctypes.data, mask.ctypes.data, fill, result.ctypes.data)
        return result

    def _described(self) -> Ints:
        """Return the fields of C's `mask_map`."""
        kind, places = _KINDS[self._number], (0, self._width, 0)
        if self._places is not None:
            places = self._places.ctypes.data, self._places.shape[1], kind
        lines = (line.ctypes.data for line in (self._rows, self._columns))
        return np.array([*lines, len(self._rows), len(self._columns), *places, kind], np.int64)

    def move(self, move: s.Crop | s.Flip | s.Resize | s.Pad, i: int) -> None:
        """Continue with sample i's move."""
        height, width = len(self._rows), len(self._columns)
        match move:
            case s.Crop():
                rows, columns = np.arange(move.height[i]) + move.y[i], np.arange(move.width[i]) + move.x[i]
            case s.Flip():
                rows, columns = np.arange(height), np.arange(width)
                rows = rows[::-1] if move.vertical[i] else rows
                columns = columns[::-1] if move.horizontal[i] else columns
            case s.Resize():
                rows, columns = _nearest(height, int(move.height[i])), _nearest(width, int(move.width[i]))
            case s.Pad():
                assert move.border == "constant", "a Pad of another border is a warp"
                rows = np.arange(-move.top[i], height + move.bottom[i])
                columns = np.arange(-move.left[i], width + move.right[i])
            case _:
                assert_never(move)
        self._select(rows, columns)

    def warp(self, warping: Warping, i: int) -> None:
        """Continue with sample i's warp."""
        y, x, height, width = warping.box[i].tolist()
        self._select(np.arange(y, y + height), np.arange(x, x + width))
        height, width = (int(side[i]) for side in warping.size)
        lookup, places = warping.lookup, np.empty((height, width), self._number)
        matrix, shown = np.ascontiguousarray(warping.matrix[i]), np.ascontiguousarray(warping.shown[i])
        described = self._described()
        way = BORDERS[lookup.border], lookup.as_torchvision
        address, size = shown.ctypes.data, (height, width)
        _warp(described.ctypes.data, matrix.ctypes.data, *way, address, *size, places.ctypes.data)
        self._places, self._rows, self._columns = places, np.arange(height), np.arange(width)

    def _select(self, rows: Ints, columns: Ints) -> None:
        """Keep these rows and columns, [h] and [w], of the result so far, which may be outside of it."""
        self._rows, self._columns = _taken(self._rows, rows), _taken(self._columns, columns)


def mask_maps(program: Program, keys: s.Keys, sizes: Ints) -> list[MaskMap]:
    """Return how the masks of N samples follow a program. sizes [N, 2]: of the upright images and of their masks."""
    maps = [MaskMap(*size) for size in sizes.tolist()]
    height, width = sizes[:, 0], sizes[:, 1]
    for step in program.steps:
        match step:
            case ResamplingStep():
                placed = moves_of_stages(zip(step.stages, step.occurrences, strict=True), keys, height, width)
                for one in placed:
                    assert one.move is not None and not isinstance(one.move, s.Warp), "warps are no resampling step"
                    for i, mask_map in enumerate(maps):
                        mask_map.move(one.move, i)
                height, width = placed[-1].after if placed else (height, width)
            case WarpStep():
                warping = step.draw(keys, height, width)
                for i, mask_map in enumerate(maps):
                    mask_map.warp(warping, i)
                height, width = warping.size
            case PointwiseStep() | LocalStep() | OpaqueStep():
                continue
            case _:
                assert_never(step)
    return maps


def _taken(line: Ints, at: Ints) -> Ints:
    """Return the numbers of `line` at these places; -1 at those outside."""
    return np.where((at >= 0) & (at < len(line)), line.take(at, mode="clip"), -1)


def _nearest(size: int, result: int) -> Ints:
    """Return the pixels that torch's nearest resampling takes, which computes in float32."""
    scale = np.float32(size) / np.float32(result)
    pixels: Ints = np.minimum(np.floor(np.arange(result, dtype=np.float32) * scale).astype(np.int64), size - 1)
    return pixels
