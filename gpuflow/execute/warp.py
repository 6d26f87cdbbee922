"""Warps an image by a projective map on the CPU: the reference for the GPU's kernel.

A result is at most one level from the exact one: OpenCV 5 computes `bilinear` in float32 where coordinates are small
enough for that; otherwise coordinates are computed in float64 and weights in float32. With a constant border,
`bilinear` blends at the edge as torchvision does: mask * (sum - fill) + fill, where `sum` adds the weighted pixels
inside the image and `mask` their weights. With the other borders, pixels outside are looked up inside. A map that only
mirrors and shifts whole pixels copies them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute.jit import loops_of
from gpuflow.pipeline.stage import Lookup

__all__ = [
    "OPENCV_BORDERS",
    "PLACES",
    "REMAPPED",
    "TIE",
    "TINY",
    "float32_map",
    "fold_back",
    "image_points",
    "look_up_by_loops",
    "points_as_torchvision",
    "seen_points",
    "warp",
]

TIE = 2.0**-20
"""A nearest pixel whose edge is less than this away is the next one, so that rounding errors do not choose."""
PLACES = 2.0**11
"""Bilinear places are multiples of 1 / PLACES of a pixel."""
TINY = 1e-12
"""The third coordinate of a point is at least this large, so that a point at the horizon has coordinates."""
REMAPPED = 2**15 - 2
"""OpenCV looks pixels up in images whose sides are smaller: it takes their places as int16."""
_FLOAT32_REACH = 2.0**13
"""A sum of float32 terms that stay below this gives a place that is wrong by less than 0.001 of a pixel."""
_LEAST_THIRD = 0.25
"""Of a projective map, if its third coordinate, which is 1 somewhere, stays at least this large."""
_MARGIN = 0.01
"""More than the error of a place in float32, in pixels."""
OPENCV_BORDERS = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}
"""What OpenCV calls each border."""
_TILE = 256
"""Results are made in squares of this side, each from the part of the image that it shows: both are floats then."""

Numbers = NDArray[np.float64]


def warp(
    image: NDArray[np.uint8],
    matrix: Numbers,
    part: tuple[int, int, int, int],
    lookup: Lookup,
    out: NDArray[np.uint8],
) -> None:
    """Write the part (y, x, height, width) of a warped image into `out`.

    Args:
        image: [H, W, C].
        matrix: [3, 3], maps a point of the result to a point of the image.
        out: [height, width, C], with any strides.
    """
    shifts = _whole_shifts(matrix)
    if shifts is not None:
        _copy(image, shifts, part, lookup, out)
        return
    if lookup.interpolation == "bilinear" and _is_near(matrix, part) and _opencv_is_exact():
        _bilinear_by_opencv(image, matrix, part, lookup, out)
        return
    is_small = max(*image.shape[:2], *part[2:]) < REMAPPED
    fixed = lookup.interpolation == "nearest" and lookup.border == "constant" and is_small
    if fixed and (loops := loops_of("mask_loops")) is not None:
        _remap(image, _places_by_loops(loops, image.shape, matrix, part, lookup), lookup, out)
        return
    y, x, height, width = part
    for top in range(0, height, _TILE):
        for left in range(0, width, _TILE):
            tile = out[top : top + _TILE, left : left + _TILE]
            rows, columns = (np.arange(side, dtype=np.float64) for side in tile.shape[:2])
            points = columns[None] + (x + left + 0.5), rows[:, None] + (y + top + 0.5)
            at_x, at_y = seen_points(matrix, *points, image.shape[:2], lookup)
            (_nearest if lookup.interpolation == "nearest" else _bilinear)(image, at_x, at_y, lookup, tile)


def _whole_shifts(matrix: Numbers) -> tuple[tuple[bool, int], tuple[bool, int]] | None:
    """For y and x: whether the map mirrors, and by how much it then shifts; None unless it only does this, exactly."""
    (a, b, x), (c, d, y), last = matrix.tolist()
    whole = abs(a) == abs(d) == 1 and b == c == 0 and last == [0, 0, 1] and x == int(x) and y == int(y)
    return ((d < 0, int(y)), (a < 0, int(x))) if whole else None


def _copy(
    image: NDArray[np.uint8],
    shifts: tuple[tuple[bool, int], tuple[bool, int]],
    part: Sequence[int],
    lookup: Lookup,
    out: NDArray[np.uint8],
) -> None:
    (mirror_y, shift_y), (mirror_x, shift_x) = shifts
    (y, x, count_y, count_x), (height, width) = part, image.shape[:2]
    rows, columns = np.arange(y, y + count_y), np.arange(x, x + count_x)
    rows = shift_y - 1 - rows if mirror_y else shift_y + rows
    columns = shift_x - 1 - columns if mirror_x else shift_x + columns
    inside_y, inside_x = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    if inside_y.all() and inside_x.all() and out.size:
        np.copyto(out, image[_slice(rows), _slice(columns)])
        return
    if lookup.border == "constant":
        out[...] = lookup.fill
        if inside_y.any() and inside_x.any():
            (y0, y1), (x0, x1) = (np.flatnonzero(inside)[[0, -1]].tolist() for inside in (inside_y, inside_x))
            visible = image[_slice(rows[y0 : y1 + 1]), _slice(columns[x0 : x1 + 1])]
            np.copyto(out[y0 : y1 + 1, x0 : x1 + 1], visible)
        return
    rows, columns = (fold_back(at, side, lookup.border) for at, side in ((rows, height), (columns, width)))
    np.copyto(out, image[rows][:, columns])


def _slice(at: NDArray[np.int64]) -> slice:
    """Consecutive numbers, ascending or descending, as a slice."""
    first, last = int(at[0]), int(at[-1])
    if last < first:
        return slice(first, last - 1 if last else None, -1)
    return slice(first, last + 1)


def fold_back(at: NDArray[Any], length: int, border: str) -> NDArray[Any]:
    """Indices of pixels, whole or between two, of which those outside 0 to length - 1 are looked up inside.

    Indices that are next to each other outside must be so inside, or be equal: `bilinear` takes the next pixel, too.
    """
    match border:
        case "reflect" if length > 1:
            at = at % (2 * (length - 1))
            folded: NDArray[Any] = np.minimum(at, 2 * (length - 1) - at)
            return folded
        case "symmetric":
            at = at % (2 * length)
            at = np.minimum(at, 2 * length - 1 - at)
        case "edge" | "reflect":
            pass  # the nearest pixel, which of one pixel is that one
        case _:
            raise ValueError(f"border {border!r} looks up no pixel inside the image")
    return np.clip(at, 0, length - 1)


def image_points(matrix: Numbers, x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The points of the image that points of the result show, for instance x [1, W], y [H, 1] to [H, W] each."""
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
    at_x, at_y = a * x + (b * y + c), d * x + (e * y + f)
    if (g, h, i) == (0, 0, 1):
        return at_x, at_y
    third = g * x + (h * y + i)
    third = np.where(np.abs(third) < TINY, TINY, third)
    return at_x / third, at_y / third


def float32_map(matrix: Numbers, height: Any, width: Any) -> NDArray[np.float32]:
    """Affine maps [..., 3, 3] as torchvision has them in float32, [..., 2, 3]: about the center of images of these
    sizes, and in units of half their sides."""
    found = np.empty((*matrix.shape[:-2], 2, 3), np.float32)
    for i, side in enumerate((width, height)):
        across, down = matrix[..., i, 0], matrix[..., i, 1]
        found[..., i, 0], found[..., i, 1] = across, down
        found[..., i, 2] = matrix[..., i, 2] + (across * width + down * height - side) / 2
        found[..., i, :] /= np.asarray(side / 2, np.float32)[..., None]
    return found


def points_as_torchvision(
    matrix: Numbers, x: NDArray[Any], y: NDArray[Any], size: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """As `image_points`, but the centers of the pixels that torchvision v2 takes with `nearest`, by an affine map to a
    result of the image's size (height, width).

    Where a point lies between two pixels, its rounding errors choose: those of float32, of `_affine_grid`'s product on
    a GPU or an Intel processor, each term of which is multiplied and added at once, and of PyTorch's grid_sample. Here
    all is computed in float64, which holds products of two float32 numbers exactly, and rounded after each step.
    """
    (height, width), found = size, []
    for (across, down, shift), side in zip(float32_map(matrix, *size), (width, height), strict=True):
        place = ((x - width / 2) * across).astype(np.float32)
        place = ((y - height / 2) * down + place).astype(np.float32) + shift + np.float32(1)
        place = (place.astype(np.float64) * side - 1).astype(np.float32)
        found.append(np.rint(place / 2).astype(np.float64) + 0.5)
    return found[0], found[1]


def seen_points(
    matrix: Numbers, x: NDArray[Any], y: NDArray[Any], size: Sequence[int], lookup: Lookup
) -> tuple[NDArray[Any], NDArray[Any]]:
    """`image_points`, or `points_as_torchvision` of an image of this size, as the lookup asks for."""
    return points_as_torchvision(matrix, x, y, size) if lookup.as_torchvision else image_points(matrix, x, y)


def _nearest(image: NDArray[np.uint8], x: Numbers, y: Numbers, lookup: Lookup, out: NDArray[np.uint8]) -> None:
    (height, width), constant, far = image.shape[:2], lookup.border == "constant", 2.0**31
    if constant and max(height, width) < REMAPPED:
        places = np.empty((*x.shape, 2), np.int16)
        for axis, (at, side) in enumerate(((x, width), (y, height))):
            np.copyto(places[..., axis], np.floor(np.clip(at, -1, side) + TIE), casting="unsafe")
        _remap(image, places, lookup, out)
        return
    columns, rows = (np.floor(np.clip(at, -far, far) + TIE).astype(np.int64) for at in (x, y))
    if not constant:
        columns, rows = fold_back(columns, width, lookup.border), fold_back(rows, height, lookup.border)
        out[...] = image[rows, columns]
        return
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    out[...] = lookup.fill
    out[inside] = image[rows[inside], columns[inside]]


def _places_by_loops(
    loops: ModuleType, size: Sequence[int], matrix: Numbers, part: tuple[int, int, int, int], lookup: Lookup
) -> NDArray[np.int16]:
    """The places that the pixels of a part show in an image of this size, by one call that does not hold the GIL."""
    shown, places = np.array(part), np.empty((*part[2:], 2), np.int16)
    rows, columns = (np.arange(side) for side in size[:2])
    look_up_by_loops(loops, matrix, lookup, rows, columns, shown, shown[:2], places)
    return places


def look_up_by_loops(
    loops: ModuleType,
    matrix: Numbers,
    lookup: Lookup,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    shown: NDArray[np.int64],
    first: NDArray[np.int64],
    places: NDArray[Any],
) -> None:
    """Write places: see `mask_loops.look_up`."""
    rounded = float32_map(matrix, len(rows), len(columns)) if lookup.as_torchvision else None
    loops.look_up(matrix, rounded, TIE, TINY, rows, columns, shown, first, places)


def _remap(image: NDArray[np.uint8], places: NDArray[np.int16], lookup: Lookup, out: NDArray[np.uint8]) -> None:
    """Look up pixels at places [H, W, 2] of columns and rows; those outside the image get the fill."""
    no_more, fill = np.empty(0, np.int16), np.broadcast_to(lookup.fill, image.shape[2:]).tolist()
    pixels = cv2.remap(image, places, no_more, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=fill)
    np.copyto(out, pixels.reshape(out.shape))


def _is_near(matrix: Numbers, part: Sequence[int]) -> bool:
    """Whether float32 is enough for the places that the part's points come from."""
    y, x, height, width = part
    right, bottom = x + width, y + height
    corners = matrix[2] @ np.array([[x, right, x, right], [y, y, bottom, bottom], [1, 1, 1, 1]])
    terms = np.abs(matrix[:2]) @ [max(abs(x), abs(right)), max(abs(y), abs(bottom)), 1]
    return bool(corners.min() >= _LEAST_THIRD and corners.max() <= 1 / _LEAST_THIRD and terms.max() <= _FLOAT32_REACH)


@functools.cache
def _opencv_is_exact() -> bool:
    """Whether OpenCV computes places in floats, as version 5 does; version 4 rounded them to 1/32 of a pixel."""
    shift = np.array([[1 / 64, 0, 0], [0, 1, 0], [0, 0, 1]])  # from black to white in 64 columns
    expected = np.broadcast_to(np.arange(64)[None, :, None] * (255 / 64), (4, 64, 3))
    for channels in (1, 3):
        ramp = np.zeros((4, 2, channels), np.uint8)
        ramp[:, 1] = 255
        for function, matrix in ((cv2.warpAffine, shift[:2]), (cv2.warpPerspective, shift)):
            found = function(ramp, matrix, (64, 4), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)
            if np.abs(found.reshape(4, 64, channels) - expected[..., :channels]).max() > 0.55:
                return False
    return True


def _bilinear_by_opencv(
    image: NDArray[np.uint8], matrix: Numbers, part: Sequence[int], lookup: Lookup, out: NDArray[np.uint8]
) -> None:
    """OpenCV's points are indices of pixels, half a pixel less than ours. Its constant border is blended only once."""
    y, x, height, width = part
    back = matrix @ [[1, 0, x + 0.5], [0, 1, y + 0.5], [0, 0, 1]]
    back[:2] -= 0.5 * back[2]
    function, given = (cv2.warpAffine, back[:2]) if matrix[2].tolist() == [0, 0, 1] else (cv2.warpPerspective, back)
    pixels = function(
        image,
        given,
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=OPENCV_BORDERS[lookup.border],
        borderValue=np.broadcast_to(lookup.fill, image.shape[2:]).tolist(),
    )
    np.copyto(out, pixels.reshape(out.shape))
    if lookup.border == "constant":
        _blend_edge(image, back, lookup.fill, out)


def _band(back: Numbers, size: tuple[int, int], result: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the result's pixels that are seen less than a pixel outside an image of this size, or so.

    Each row of the result meets the image, and the image with a margin, in one interval.
    """
    (a, b, c), (d, e, f), (g, h, i) = back.tolist()
    y = np.arange(result[0], dtype=np.float64)
    third = h * y + i
    ends = []
    for margin in (1 + _MARGIN, -_MARGIN):  # outside, inside: x + margin >= 0, x - side + 1 - margin <= 0
        low, high = np.zeros(result[0]), np.full(result[0], float(result[1]))
        for slope, rest, side in ((a, b * y + c, size[1]), (d, e * y + f, size[0])):
            last = side - 1 + margin
            for p, q in ((slope + margin * g, rest + margin * third), (last * g - slope, last * third - rest)):
                # p * column + q >= 0, since the third coordinate is above 0
                if abs(p) < TINY:
                    high = np.where(q < 0, -1, high)
                elif p > 0:
                    low = np.maximum(low, -q / p)
                else:
                    high = np.minimum(high, -q / p)
        first = np.ceil(low).astype(np.int64)
        ends.append((first, np.maximum(np.minimum(np.floor(high) + 1, result[1]).astype(np.int64), first)))
    (begin, end), (inner_begin, inner_end) = ends
    inner_begin, inner_end = np.clip(inner_begin, begin, end), np.clip(inner_end, begin, end)
    begins, counts = np.stack([begin, inner_end]).ravel(), np.stack([inner_begin - begin, end - inner_end]).ravel()
    rows = np.repeat(np.tile(np.arange(result[0]), 2), counts)
    return rows, np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def _blend_edge(image: NDArray[np.uint8], back: Numbers, fill: Sequence[float], out: NDArray[np.uint8]) -> None:
    """Write the pixels of `out` that are partly outside the image. back [3, 3]: maps indices of pixels."""
    height, width = image.shape[:2]
    at = _band(back, (height, width), (out.shape[0], out.shape[1]))
    if not len(at[0]):
        return
    x, y = image_points(back, at[1].astype(np.float64), at[0].astype(np.float64))
    left, top = np.floor(x), np.floor(y)
    total, covered = np.zeros((len(x), image.shape[2])), np.zeros(len(x))
    for column, across in ((left, left + 1 - x), (left + 1, x - left)):
        for row, down in ((top, top + 1 - y), (top + 1, y - top)):
            weight = across * down * ((column >= 0) & (column < width) & (row >= 0) & (row < height))
            place = np.clip(row, 0, height - 1).astype(np.int64), np.clip(column, 0, width - 1).astype(np.int64)
            total += weight[:, None] * image[place]
            covered += weight
    out[at] = np.rint(covered[:, None] * (total - fill) + fill)


def _bilinear(image: NDArray[np.uint8], x: Numbers, y: Numbers, lookup: Lookup, out: NDArray[np.uint8]) -> None:
    (height, width), constant, far = image.shape[:2], lookup.border == "constant", 2.0**31
    if constant:  # from one pixel outside on, nothing is seen
        x, y = np.clip(x - 0.5, -1, width), np.clip(y - 0.5, -1, height)
    else:
        x, y = (fold_back(np.clip(at - 0.5, -far, far), side, lookup.border) for at, side in ((x, width), (y, height)))
    x, y = (np.rint(at * PLACES) / PLACES for at in (x, y))
    (x0, x1), (y0, y1) = _span(x, width), _span(y, height)
    if x1 <= x0 or y1 <= y0:
        out[...] = lookup.fill
        return
    source = _as_floats(image[y0:y1, x0:x1])
    grid = np.empty((1, *x.shape, 2), np.float32)
    np.multiply(x - (x0 - 0.5), 2 / source.shape[3], out=grid[0, ..., 0], casting="same_kind")
    np.multiply(y - (y0 - 0.5), 2 / source.shape[2], out=grid[0, ..., 1], casting="same_kind")
    sampled = torch.nn.functional.grid_sample(
        source, torch.from_numpy(grid).sub_(1), mode="bilinear", padding_mode="zeros", align_corners=False
    )[0]
    if constant and (x.min() < 0 or y.min() < 0 or x.max() > width - 1 or y.max() > height - 1):
        shares = [
            np.minimum(np.minimum(at + 1, side - at), 1).astype(np.float32) for at, side in ((x, width), (y, height))
        ]
        fill = torch.tensor(lookup.fill, dtype=torch.float32, device="cpu")[:, None, None]
        sampled = (sampled - fill) * torch.from_numpy(shares[0] * shares[1]) + fill
    np.copyto(out, sampled.round_().to(torch.uint8).permute(1, 2, 0).numpy())


def _as_floats(image: NDArray[np.uint8]) -> torch.Tensor:
    """An image [H, W, C] as float32 planes [1, C, 2^a, 2^b], with zeros next to its right and lower edge.

    With such sides, and places that are multiples of 1 / PLACES, grid_sample computes without rounding where a place
    is, so the result is the same for any part of an image. What is further to the right or below is undefined.
    """
    height, width, channels = image.shape
    sides = (1 << (side + 1).bit_length() for side in (height, width))
    planes = torch.empty((1, channels, *sides), dtype=torch.float32, device="cpu")
    planes[0, :, :height, :width] = torch.from_numpy(image).permute(2, 0, 1)
    planes[0, :, height : height + 2, : width + 2] = 0
    planes[0, :, :height, width : width + 2] = 0
    return planes


def _span(at: Numbers, length: int) -> tuple[int, int]:
    """The range (start, stop) of the pixels whose neighbours these places between pixels are."""
    return max(0, int(np.floor(at.min()))), min(length, int(np.floor(at.max())) + 2)
