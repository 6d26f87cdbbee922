"""`gpuflow samples --kind detection`: photographs with coloured shapes on them, and their boxes, outlines and masks.

The shapes are polygons with whole-numbered corners, so that boxes, outlines and masks agree exactly: a pixel belongs to
a shape if its centre lies within the outline.

    images/000000.jpg   the images
    masks/000000.png    for each pixel 0, or 1 + the label of its shape
    instances.json      all of it in COCO's format
    listing.jsonl       for each image `path`, `boxes` (xyxy), `labels`, `polygons`, `mask`
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.runtime.cpu_budget import available_threads
from gpuflow.tools.samples import Samples, check_numbers, claim, encoded, load_photos, noisy_crop, write

SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "rectangle": ((0, 0), (12, 0), (12, 12), (0, 12)),
    "triangle": ((6, 0), (12, 12), (0, 12)),
    "octagon": ((4, 0), (8, 0), (12, 4), (12, 8), (8, 12), (4, 12), (0, 8), (0, 4)),
}
"""Corners of the classes' shapes, x and y in twelfths of their width and height, clockwise."""

_COLORS = ((220, 40, 40), (40, 190, 60), (50, 80, 230))
_SIZES = ((320, 240), (240, 320), (288, 288))  # width, height in pixels
_RECIPE = 1  # a change of the files made here needs a new number
_MOST_SHAPES = 4
_TRIES = 20


@dataclass(frozen=True, slots=True)
class _Shape:
    """One shape on an image. corners: int64 [P, 2] of x and y, clockwise."""

    label: int
    color: tuple[int, int, int]
    corners: Ints

    @property
    def box(self) -> list[int]:
        """x1, y1, x2, y2."""
        return [*self.corners.min(axis=0).tolist(), *self.corners.max(axis=0).tolist()]

    @property
    def area(self) -> float:
        x, y = self.corners.T
        return abs(int((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())) / 2

    def mask(self, height: int, width: int) -> Bools:
        """The pixels whose centre lies within the outline: [H, W]."""
        y, x = np.ogrid[1 : 2 * height : 2, 1 : 2 * width : 2]  # centres, in half pixels
        inside = np.ones((height, width), dtype=bool)
        for (x1, y1), (x2, y2) in zip(2 * self.corners, 2 * np.roll(self.corners, -1, axis=0), strict=True):
            inside &= (x2 - x1) * (y - y1) - (y2 - y1) * (x - x1) >= 0
        return inside


@dataclass(frozen=True, kw_only=True, slots=True)
class _Image:
    """An image with its mask. num_bytes: of both files. is_new: whether they were made now."""

    height: int
    width: int
    shapes: list[_Shape]
    num_bytes: int
    is_new: bool


def make_detection_samples(
    directory: str | os.PathLike[str],
    count: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
    num_threads: int | None = None,
) -> Samples:
    """Fill `directory` with `count` images, their masks, `instances.json` and `listing.jsonl`.

    A file depends only on the seed, its number and the photographs; files that exist are kept. Parameters and
    exceptions are those of `make_samples`.
    """
    root = Path(directory)
    check_numbers(count, seed)
    photos = list(load_photos().values())
    claim(root, {"recipe": _RECIPE, "kind": "detection", "count": count, "seed": seed, "photos": len(photos)})
    for name in ("images", "masks"):
        (root / name).mkdir(exist_ok=True)

    def make(i: int) -> _Image:
        rng = np.random.default_rng([seed, i])
        pixels_HWC, quality = noisy_crop(photos[i % len(photos)], rng, _SIZES)
        height, width = pixels_HWC.shape[:2]
        shapes = _draw(rng, height, width)
        image, mask = root / "images" / f"{i:06d}.jpg", root / "masks" / f"{i:06d}.png"
        is_new = not (image.exists() and mask.exists())
        if is_new:
            levels_HW = np.zeros((height, width), np.uint8)
            for shape in shapes:
                inside = shape.mask(height, width)
                levels_HW[inside] = shape.label + 1
                pixels_HWC[inside] = shape.color
            write(image, encoded(pixels_HWC, quality))
            write(mask, _png(levels_HW))
        num_bytes = image.stat().st_size + mask.stat().st_size
        return _Image(height=height, width=width, shapes=shapes, num_bytes=num_bytes, is_new=is_new)

    images: list[_Image] = []
    with ThreadPoolExecutor(num_threads or available_threads()) as pool:
        for image in pool.map(make, range(count)):
            images.append(image)
            if progress is not None:
                progress(len(images), count)
    made, total_bytes = sum(image.is_new for image in images), sum(image.num_bytes for image in images)
    total_bytes += write(root / "instances.json", json.dumps(_coco(images)).encode())
    total_bytes += write(root / "listing.jsonl", "".join(map(_line, range(count), images)).encode())
    return Samples(directory=root, count=count, made=made, total_bytes=total_bytes, classes=tuple(SHAPES))


def _draw(rng: np.random.Generator, height: int, width: int) -> list[_Shape]:
    """Shapes that do not overlap, one at least."""
    shapes: list[_Shape] = []
    wanted = int(rng.integers(1, _MOST_SHAPES + 1))
    for _ in range(_TRIES):
        label = int(rng.integers(len(SHAPES)))
        w, h = (12 * int(steps) for steps in rng.integers(3, 9, 2))  # pixels, a multiple of the corners' grid
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        shift = rng.integers(-25, 26, 3).tolist()
        corners = np.array(list(SHAPES.values())[label]) * [w // 12, h // 12] + [x, y]
        red, green, blue = (min(max(base + add, 0), 255) for base, add in zip(_COLORS[label], shift, strict=True))
        shape = _Shape(label, (red, green, blue), corners)
        if not any(_overlap(shape.box, other.box) for other in shapes):
            shapes.append(shape)
        if len(shapes) == wanted:
            break
    return shapes


def _overlap(a: list[int], b: list[int]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _coco(images: list[_Image]) -> dict[str, Any]:
    """All images and shapes in COCO's format, whose ids start from 1."""
    entries, annotations = [], list[dict[str, Any]]()
    for i, image in enumerate(images):
        entries.append({"id": i + 1, "file_name": f"{i:06d}.jpg", "height": image.height, "width": image.width})
        for shape in image.shapes:
            x1, y1, x2, y2 = shape.box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": i + 1,
                    "category_id": shape.label + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": shape.area,
                    "iscrowd": 0,
                    "segmentation": [shape.corners.reshape(-1).tolist()],
                }
            )
    categories = [{"id": label + 1, "name": name} for label, name in enumerate(SHAPES)]
    return {"images": entries, "annotations": annotations, "categories": categories}


def _line(i: int, image: _Image) -> str:
    """The image's line of the listing."""
    row = {
        "path": f"images/{i:06d}.jpg",
        "boxes": [shape.box for shape in image.shapes],
        "labels": [list(SHAPES)[shape.label] for shape in image.shapes],
        "polygons": [[shape.corners.reshape(-1).tolist()] for shape in image.shapes],
        "mask": f"masks/{i:06d}.png",
    }
    return json.dumps(row) + "\n"


def _png(levels_HW: Bytes) -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(levels_HW).save(data, "PNG")
    return data.getvalue()
