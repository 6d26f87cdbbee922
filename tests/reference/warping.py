"""Warps an image by a projective map: nearest pixels by numpy, bilinear ones by OpenCV, or by PyTorch where places are
far from the image.

With a constant border, bilinear pixels are blended at the edge as torchvision does: mask * (sum - fill) + fill, where
`sum` adds the weighted pixels inside the image and `mask` their weights. With the other borders, pixels outside are
looked up inside. A map that only mirrors and shifts whole pixels copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.pipeline.program import Warping
from gpuflow.pipeline.stage import Lookup

__all__ = ["opencv_5", "warped"]

opencv_5 = pytest.mark.skipif(
    int(cv2.__version__.split(".")[0]) < 5, reason="OpenCV 4 rounds places to 1/32 of a pixel"
)
Pixels = NDArray[np.uint8]
Numbers = NDArray[np.floating[Any]]
TIE = 2.0**-20
"""A nearest pixel whose edge is less than this away is the next one."""
PLACES = 2.0**11
"""Bilinear places far from the image are multiples of 1 / PLACES of a pixel."""
TINY = 1e-12
"""The least third coordinate of a point."""
FAR = 2.0**31
FLOAT32_REACH = 2.0**13
"""OpenCV computes places in float32, if their terms stay below this."""
LEAST_THIRD = 0.25
"""OpenCV computes projective maps whose third coordinate stays at least this large, and below its inverse."""
MARGIN = 0.01
"""Pixels that are seen this close to the image's edge, on its inside, are blended too."""
TILE = 256
"""PyTorch gets squares of this side."""
OPENCV_BORDERS = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}


def warped(image: Pixels, drawn: Warping) -> Pixels:
    """Return sample 0's result of its image [H, W, C]; what crops have padded is black."""
    y, x, height, width = drawn.box[0]
    box = np.ascontiguousarray(image[y : y + height, x : x + width])
    result = np.zeros((drawn.height[0], drawn.width[0], image.shape[2]), np.uint8)
    part = y, x, height, width = drawn.shown[0].tolist()
    if height and width:
        _warp(box, drawn.matrix[0], part, drawn.lookup, result[y : y + height, x : x + width])
    return result


def _warp(image: Pixels, matrix: Numbers, part: Sequence[int], lookup: Lookup, out: Pixels) -> None:
    """Write a part of the result. matrix [3, 3] maps a point of the result to a point of the image."""
    if _is_whole(matrix):
        _nearest(image, *_points(matrix, part), lookup, out)
    elif lookup.interpolation == "nearest":
        points = _points_of_torchvision(matrix, part, image.shape) if lookup.as_torchvision else _points(matrix, part)
        _nearest(image, *points, lookup, out)
    elif _is_near(matrix, part):
        _bilinear_by_opencv(image, matrix, part, lookup, out)
    else:
        y, x, height, width = part
        for top in range(0, height, TILE):
            for left in range(0, width, TILE):
                tile = out[top : top + TILE, left : left + TILE]
                points = _points(matrix, (y + top, x + left, *tile.shape[:2]))
                _bilinear_by_torch(image, *points, lookup, tile)


def _is_whole(matrix: Numbers) -> bool:
    """Return True if a map only mirrors and shifts whole pixels."""
    (a, b, x), (c, d, y), last = matrix.tolist()
    return bool(abs(a) == abs(d) == 1 and b == c == 0 and last == [0, 0, 1] and x == int(x) and y == int(y))


def _points(matrix: Numbers, part: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return x and y [height, width] of the image's points that the centres of the part's pixels show."""
    y, x, height, width = part
    return _mapped(matrix, np.arange(width)[None] + (x + 0.5), np.arange(height)[:, None] + (y + 0.5))


def _mapped(matrix: Numbers, x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
    at_x, at_y = a * x + (b * y + c), d * x + (e * y + f)
    if (g, h, i) == (0, 0, 1):
        return at_x, at_y
    third = g * x + (h * y + i)
    third = np.where(np.abs(third) < TINY, TINY, third)
    return at_x / third, at_y / third


def _points_of_torchvision(matrix: Numbers, part: Sequence[int], size: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return the centres of the pixels that torchvision v2 takes, with its roundings in float32.

    The map is affine, about the centre of the image and in units of half its sides.
    """
    top, left, rows, columns = part
    height, width = size[:2]
    x = np.arange(columns)[None] + (left + 0.5) - width / 2
    y = np.arange(rows)[:, None] + (top + 0.5) - height / 2
    found = []
    for (across, down, shift), side in zip(matrix[:2], (width, height), strict=True):
        half = np.float32(side / 2)
        middle = np.float32(shift + (across * width + down * height - side) / 2) / half
        place = (x * (np.float32(across) / half)).astype(np.float32)
        place = (y * np.float64(np.float32(down) / half) + place).astype(np.float32) + middle + np.float32(1)
        place = (place.astype(np.float64) * side - 1).astype(np.float32)
        found.append(np.rint(place / 2).astype(np.float64) + 0.5)
    return found[0], found[1]


def _fold_back(at: NDArray[Any], length: int, border: str) -> NDArray[Any]:
    """Return places, whole or between two pixels, of which those outside the image are looked up inside."""
    if border == "reflect" and length > 1:
        at = at % (2 * (length - 1))
        at = np.minimum(at, 2 * (length - 1) - at)
    if border == "symmetric":
        at = at % (2 * length)
        at = np.minimum(at, 2 * length - 1 - at)
    return np.clip(at, 0, length - 1)


def _nearest(image: Pixels, x: Numbers, y: Numbers, lookup: Lookup, out: Pixels) -> None:
    height, width = image.shape[:2]
    columns, rows = (np.floor(np.clip(at, -FAR, FAR) + TIE).astype(np.int64) for at in (x, y))
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    columns, rows = (_fold_back(at, side, lookup.border) for at, side in ((columns, width), (rows, height)))
    out[...] = image[rows, columns]
    if lookup.border == "constant":
        out[~inside] = lookup.fill


def _is_near(matrix: Numbers, part: Sequence[int]) -> bool:
    """Return True if float32 is enough for the places that the part's points come from."""
    y, x, height, width = part
    right, bottom = x + width, y + height
    corners = matrix[2] @ np.array([[x, right, x, right], [y, y, bottom, bottom], [1, 1, 1, 1]])
    terms = np.abs(matrix[:2]) @ [max(abs(x), abs(right)), max(abs(y), abs(bottom)), 1]
    return bool(corners.min() >= LEAST_THIRD and corners.max() <= 1 / LEAST_THIRD and terms.max() <= FLOAT32_REACH)


def _bilinear_by_opencv(image: Pixels, matrix: Numbers, part: Sequence[int], lookup: Lookup, out: Pixels) -> None:
    """OpenCV's points are indices of pixels, half a pixel less than ours."""
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
    out[...] = pixels.reshape(out.shape)
    if lookup.border == "constant":
        _blend_edge(image, back, lookup.fill, out)


def _seen(back: Numbers, size: Sequence[int], result: Sequence[int], margin: float) -> NDArray[np.bool_]:
    """Return which pixels of the result show the image with a margin around it: one interval of each row."""
    (a, b, c), (d, e, f), (g, h, i) = back.tolist()
    y = np.arange(result[0], dtype=np.float64)
    third = h * y + i
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
    columns = np.arange(result[1])
    seen: NDArray[np.bool_] = (columns >= np.ceil(low)[:, None]) & (columns <= np.floor(high)[:, None])
    return seen


def _blend_edge(image: Pixels, back: Numbers, fill: Sequence[float], out: Pixels) -> None:
    """Write the pixels of `out` that are partly outside the image. back [3, 3]: maps indices of pixels."""
    height, width = image.shape[:2]
    at = _seen(back, (height, width), out.shape, 1 + MARGIN) & ~_seen(back, (height, width), out.shape, -MARGIN)
    rows, columns = np.nonzero(at)
    x, y = _mapped(back, columns.astype(np.float64), rows.astype(np.float64))
    left, top = np.floor(x), np.floor(y)
    total, covered = np.zeros((len(x), image.shape[2])), np.zeros(len(x))
    for column, across in ((left, left + 1 - x), (left + 1, x - left)):
        for row, down in ((top, top + 1 - y), (top + 1, y - top)):
            weight = across * down * ((column >= 0) & (column < width) & (row >= 0) & (row < height))
            place = np.clip(row, 0, height - 1).astype(np.int64), np.clip(column, 0, width - 1).astype(np.int64)
            total += weight[:, None] * image[place]
            covered += weight
    out[at] = np.rint(covered[:, None] * (total - fill) + fill)


def _bilinear_by_torch(image: Pixels, x: Numbers, y: Numbers, lookup: Lookup, out: Pixels) -> None:
    """Sample a tile by PyTorch's grid_sample, from the part of the image that it shows.

    That part has sides that are powers of two, so that grid_sample computes places without rounding.
    """
    (height, width), constant = image.shape[:2], lookup.border == "constant"
    if constant:  # from one pixel outside on, nothing is seen
        x, y = np.clip(x - 0.5, -1, width), np.clip(y - 0.5, -1, height)
    else:
        x, y = (_fold_back(np.clip(at - 0.5, -FAR, FAR), side, lookup.border) for at, side in ((x, width), (y, height)))
    x, y = (np.rint(at * PLACES) / PLACES for at in (x, y))
    x0, y0 = (max(0, int(np.floor(at.min()))) for at in (x, y))
    x1, y1 = (min(side, int(np.floor(at.max())) + 2) for at, side in ((x, width), (y, height)))
    if x1 <= x0 or y1 <= y0:
        out[...] = lookup.fill
        return
    sides = [1 << (side + 1).bit_length() for side in (y1 - y0, x1 - x0)]
    source = torch.zeros((1, image.shape[2], *sides))
    source[0, :, : y1 - y0, : x1 - x0] = torch.from_numpy(image[y0:y1, x0:x1]).permute(2, 0, 1)
    grid = np.stack([(x - (x0 - 0.5)) * (2 / sides[1]), (y - (y0 - 0.5)) * (2 / sides[0])], axis=-1)
    places = torch.from_numpy(grid.astype(np.float32)).sub_(1)[None]
    sampled = torch.nn.functional.grid_sample(source, places, padding_mode="zeros", align_corners=False)[0]
    if constant and (x.min() < 0 or y.min() < 0 or x.max() > width - 1 or y.max() > height - 1):
        shares = [np.minimum(np.minimum(at + 1, side - at), 1) for at, side in ((x, width), (y, height))]
        mask = torch.from_numpy(shares[0].astype(np.float32) * shares[1].astype(np.float32))
        fill = torch.tensor(lookup.fill, dtype=torch.float32)[:, None, None]
        sampled = (sampled - fill) * mask + fill
    out[...] = sampled.round_().to(torch.uint8).permute(1, 2, 0).numpy()
