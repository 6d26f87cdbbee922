"""Masks as pixels, uint8 [H, W]: of encoded images, and of polygons and run lengths as pycocotools gives them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.codecs import format_of
from gpuflow.decode.header import SWAPPED, stored
from gpuflow.errors import is_system_fault
from gpuflow.execute.jit import loops_of
from gpuflow.pipeline.records import MaskFile, Polygons, Rle

if TYPE_CHECKING:
    from PIL import ImageFile

__all__ = ["Instance", "compile_loops", "decode_mask", "draw_instance", "instance_mask", "mask_fault"]

Instance = Polygons | Rle | NDArray[np.uint8]
"""The mask of one instance; pixels are 0 and 1."""
_SCALE = 5
"""pycocotools draws outlines on a grid that is finer than the pixels by this factor."""
_FARTHEST = 2**20
"""The largest coordinate of an outline, in pixels. The time to draw an edge grows with its length."""
_PILLOW = {"png": "PNG", "bmp": "BMP", "gif": "GIF", "jpeg": "JPEG", "pnm": "PPM", "tiff": "TIFF"}
"""Pillow's names of the formats that a mask may have."""
_BITS_TAG, _ORIENTATION_TAG = 0x0102, 0x0112
_FULL, _TOP_LEVELS = 255, {2: 3, 4: 15}
"""The highest level of 8 bits, and of fewer bits."""


def compile_loops() -> None:
    """Compile the loop that draws outlines, if numba is installed."""
    instance_mask(Polygons((np.array([[1.0, 1.0], [3.0, 1.0], [2.0, 3.0]]),)), (4, 4))


def decode_mask(
    mask: MaskFile | NDArray[np.uint8], size: tuple[int, int], formats: Sequence[str] = (), *, upright: bool = False
) -> NDArray[np.uint8]:
    """Return the levels of a mask, uint8 [height, width], with 0 for black as in Pillow; of a palette, its indices.

    A file must be a PNG by its content. No other decoder of Pillow reads it.

    formats: what a file may be besides, as `FieldSpec.formats` names it.
    upright: apply the Orientation tag of a TIFF, as `decode: {orientation: apply}` does for images.

    Raises ValueError if it is of another format, has not one 8-bit channel, or is not of this size; and faults of the
    environment.
    """
    if isinstance(mask, np.ndarray):
        if mask.shape != size:
            raise ValueError(_other_size(mask.shape, size))
        return mask
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
    """The orientation that Pillow applies when it loads an image: the Orientation tag of a TIFF, 1 for other files.

    Removes XMP data, whose orientation Pillow would apply to a TIFF without that tag.
    """
    for key in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(key, None)
    if image.format != "TIFF":
        return 1
    orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    return orientation if orientation in range(1, 9) else 1


def _rescaled(levels: NDArray[np.uint8], top: int) -> NDArray[np.uint8]:
    """Levels of 0 to 255 as levels of 0 to `top`, rounded to the nearest."""
    return ((levels.astype(np.uint16) * top + _FULL // 2) // _FULL).astype(np.uint8)


def _top_level(image: ImageFile.ImageFile, data: bytes) -> int:
    """The gray level of a file that Pillow, when it loads the pixels, converts to 255, and all others in proportion.

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
    """Why an instance's mask is not one of an image of this size; None if it is one."""
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


def instance_mask(mask: Instance, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The pixels of one instance, 0 or 1, uint8 [height, width]; of polygons by pycocotools' rules (rleFrPoly)."""
    down = np.zeros(size[::-1], np.uint8)
    draw_instance(mask, 0, down)
    return down.T


def draw_instance(mask: Instance, bit: int, down: NDArray[np.uint8]) -> None:
    """Set a bit of the pixels of one instance. down [width, height]: its pixels column by column."""
    if isinstance(mask, np.ndarray):
        down |= mask.T << bit
        return
    width, height = down.shape
    if isinstance(mask, Rle):
        levels = (np.arange(len(mask.counts)) % 2).astype(np.uint8) << bit
        down |= np.repeat(levels, mask.counts).reshape(width, height)
        return
    for outline in mask.outlines:
        points = (_SCALE * outline + 0.5).astype(np.int64)
        if (loops := loops_of("mask_loops")) is not None:
            loops.draw_outline(points, _SCALE, np.uint8(1 << bit), down)
        else:
            first, inside = _filled(_turns(points, height, width), height, width)
            down[first : first + len(inside)] |= inside << bit


def _filled(turns: NDArray[np.int64], height: int, width: int) -> tuple[int, NDArray[np.uint8]]:
    """The pixels between each two turns, or between the last one and the image's end: 0 or 1, [columns, height].

    Returns the first of these columns, too; all others are outside.
    """
    turns = turns[turns < height * width]
    if not len(turns):
        return 0, np.zeros((0, height), np.uint8)
    first, last = int(turns.min()) // height, int(turns.max()) // height
    stop = width if len(turns) % 2 else last + 1
    inside = np.zeros((stop - first) * height, np.uint8)
    np.bitwise_xor.at(inside, turns - first * height, 1)
    np.bitwise_xor.accumulate(inside, out=inside)
    return first, inside.reshape(-1, height)


def _turns(points: NDArray[np.int64], height: int, width: int) -> NDArray[np.int64]:
    """Where, counting pixels column by column, the inside of a closed outline begins or ends.

    points [n, 2]: x and y of its corners, on the finer grid.
    """
    x, y = points[:, 0], points[:, 1]
    x_end, y_end = np.roll(x, -1), np.roll(y, -1)
    dx, dy = np.abs(x - x_end), np.abs(y - y_end)
    flat = dx >= dy
    backwards = np.where(flat, x > x_end, y > y_end)
    x_start, x_end = np.where(backwards, x_end, x), np.where(backwards, x, x_end)
    y_start, y_end = np.where(backwards, y_end, y), np.where(backwards, y, y_end)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(flat, (y_end - y_start) / dx, (x_end - x_start) / dy)
    slope = np.nan_to_num(slope)
    length = np.maximum(dx, dy)
    edge = np.repeat(np.arange(len(length)), length + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(length + 1) - (length + 1), length + 1)
    step = np.where(backwards[edge], length[edge] - step, step)
    across = np.where(flat, x_start, y_start)[edge] + step
    other = (np.where(flat, y_start, x_start)[edge] + slope[edge] * step + 0.5).astype(np.int64)
    u, v = np.where(flat[edge], across, other), np.where(flat[edge], other, across)
    crossing = u[1:] != u[:-1]
    column = (np.where(u[1:] < u[:-1], u[1:], u[1:] - 1)[crossing] + 0.5) / _SCALE - 0.5
    row = (np.minimum(v[1:], v[:-1])[crossing] + 0.5) / _SCALE - 0.5
    inside = (np.floor(column) == column) & (column >= 0) & (column <= width - 1)
    row = np.ceil(np.clip(row, 0, height))
    turns: NDArray[np.int64] = (column * height + row)[inside].astype(np.int64)
    return turns
