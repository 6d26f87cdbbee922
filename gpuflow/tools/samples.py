"""`gpuflow samples`: makes sample JPEGs without a download, from photographs in scikit-image and scikit-learn.

Each photograph is one class. A file depends only on the seed, its number and the photographs: a crop of 55 to 100% of
the sides, resized to one of a few sizes, slightly brighter or darker, with noise. Existing files are kept, so a call
that was interrupted can be repeated to make the rest.

With `--kind detection` the photographs have coloured shapes on them. The shapes are polygons with whole-numbered
corners, so that boxes, outlines and masks agree exactly: a pixel belongs to a shape if its centre lies within the
outline.

    images/000000.jpg   the images
    masks/000000.png    for each pixel 0, or 1 + the label of its shape
    instances.json      all of it in COCO's format
    listing.jsonl       for each image `path`, `boxes` (xyxy), `labels`, `polygons`, `mask`
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.errors import ConfigError, MissingExtra, Problem
from gpuflow.runtime.files import atomic_write
from gpuflow.runtime.threads import available_threads

if TYPE_CHECKING:
    from PIL import Image

PHOTOS: dict[str, str] = {
    "astronaut": "skimage/data/astronaut.png",
    "brick": "skimage/data/brick.png",
    "camera": "skimage/data/camera.png",
    "chelsea": "skimage/data/chelsea.png",
    "china": "sklearn/datasets/images/china.jpg",
    "coffee": "skimage/data/coffee.png",
    "flower": "sklearn/datasets/images/flower.jpg",
    "grass": "skimage/data/grass.png",
    "gravel": "skimage/data/gravel.png",
    "hubble": "skimage/data/hubble_deep_field.jpg",
    "moon": "skimage/data/moon.png",
    "motorcycle": "skimage/data/motorcycle_left.png",
    "retina": "skimage/data/retina.jpg",
    "rocket": "skimage/data/rocket.jpg",
    "tissue": "skimage/data/ihc.png",
}
"""Class name -> path, from the package on. Only files that the packages' wheels contain."""

_PROJECTS = {"PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"}
_SIZES = ((500, 375), (375, 500), (500, 333), (500, 500))  # width, height in pixels
_MARKER = ".samples.json"
_RECIPE = 1  # a change of the pixels made here needs a new number
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The result of `make_samples`: `made` of the `count` files are new, the others existed already."""

    directory: Path
    count: int
    made: int
    total_bytes: int
    classes: tuple[str, ...]

    def __str__(self) -> str:
        size = f"{self.total_bytes / 1e6:.1f} MB"
        return f"{self.directory}: {self.count} images, {len(self.classes)} classes, {size} ({self.made} new)"


def make_samples(
    directory: str | os.PathLike[str],
    count: int,
    *,
    seed: int = 0,
    progress: Callable[..., object] = lambda **numbers: None,
) -> Samples:
    """Fill `directory` with `count` JPEGs in one folder per class: `coffee/000005.jpg`.

    Args:
        directory: absent, empty, or filled by an earlier call with the same arguments.
        count: number of files, spread evenly over the classes.
        seed: selects the crops.
        progress: called in the caller's thread with the number of files that are `completed`.

    Raises:
        ConfigError: the directory holds something else.
        MissingExtra: one of the `samples` packages is not installed.
    """
    photos, root = load_photos(), Path(directory)
    classes = tuple(photos)
    _claim(root, classes[:count], {"recipe": _RECIPE, "count": count, "seed": seed, "classes": list(classes)})

    def make(i: int) -> tuple[bool, int]:
        """Return whether file i is new, and its size in bytes."""
        name = classes[i % len(classes)]
        path = root / name / f"{i:06d}.jpg"
        if path.exists():
            return False, path.stat().st_size
        return True, write(path, encoded(*noisy_crop(photos[name], np.random.default_rng([seed, i]), _SIZES)))

    files = _make_all(make, count, progress)
    made, total_bytes = sum(is_new for is_new, _ in files), sum(size for _, size in files)
    return Samples(directory=root, count=count, made=made, total_bytes=total_bytes, classes=classes[:count])


def _make_all(make: Callable[[int], T], count: int, progress: Callable[..., object]) -> list[T]:
    """Return what `make` gives for each of `count` numbers, on threads. See `make_samples`."""
    found: list[T] = []
    with ThreadPoolExecutor(available_threads()) as pool:
        for one in pool.map(make, range(count)):
            found.append(one)
            progress(completed=len(found))
    return found


def load_photos() -> dict[str, Image.Image]:
    """Return the decoded photographs by class name, without those that the installed package does not contain."""
    roots: dict[str, Path] = {}
    for package, project in _PROJECTS.items():
        spec = importlib.util.find_spec(package)  # finds the files without importing the package
        if spec is None or spec.origin is None:
            raise MissingExtra("gpuflow samples", project, "samples")
        roots[package] = Path(spec.origin).parent
    from PIL import Image

    photos = {}
    for name, file in PHOTOS.items():
        package, _, inside = file.partition("/")
        if (path := roots[package] / inside).exists():
            with Image.open(path, formats=("JPEG", "PNG")) as image:
                photos[name] = image.convert("RGB")
    return photos


def _claim(root: Path, folders: Sequence[str], recipe: dict[str, Any]) -> None:
    """Write the marker of this recipe into the directory, and make folders there.

    Raises:
        ConfigError: the directory holds something else.
    """
    root.mkdir(parents=True, exist_ok=True)
    marker, holds = root / _MARKER, ""
    if marker.exists():
        found = json.loads(marker.read_text())
        differ = (f"{key}={found.get(key)!r} (not {recipe[key]!r})" for key in recipe if found.get(key) != recipe[key])
        if other := ", ".join(differ):
            holds = f"samples made with {other}"
    elif (entry := min(root.iterdir(), default=None)) is not None:
        holds = repr(entry.name)
    if holds:
        rule = f"must be absent, empty or filled by the same command before, but holds {holds}"
        raise ConfigError([Problem(str(root), f"{rule}; name another directory or remove this one")])
    if not marker.exists():
        write(marker, json.dumps(recipe).encode())
    for folder in folders:
        (root / folder).mkdir(exist_ok=True)


def write(path: Path, data: bytes) -> int:
    """Write a file and return its size in bytes."""
    with atomic_write(path) as file:
        file.write(data)
    return len(data)


def noisy_crop(photo: Image.Image, rng: np.random.Generator, sizes: Sequence[tuple[int, int]]) -> tuple[Bytes, int]:
    """Return the pixels of one crop, resized to one of these sizes (width, height), and the quality to encode it with.

    After the random draws only integers are used, so that every machine makes the same pixels.
    """
    from PIL import Image

    share, gain = rng.uniform(0.55, 1.0), rng.uniform(0.8, 1.2)
    width, height = (int(side * share) for side in photo.size)
    x, y = rng.integers(0, photo.width - width + 1), rng.integers(0, photo.height - height + 1)
    size = sizes[int(rng.integers(len(sizes)))]
    quality = int(rng.integers(85, 95))
    crop = photo.resize(size, Image.Resampling.LANCZOS, box=(int(x), int(y), int(x) + width, int(y) + height))
    pixels_HWC = np.asarray(crop.point([min(int(level * gain), 255) for level in range(256)] * 3), np.int16)
    noise_HWC = rng.integers(-7, 8, pixels_HWC.shape, dtype=np.int8)
    return (pixels_HWC + noise_HWC).clip(0, 255).astype(np.uint8), quality


def encoded(pixels_HWC: Bytes, quality: int) -> bytes:
    """Return pixels as a JPEG."""
    return _image_file(pixels_HWC, "JPEG", quality=quality, subsampling="4:2:0")


def _image_file(pixels: Bytes, form: str, **options: Any) -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels).save(data, form, **options)
    return data.getvalue()


# --- detection --------------------------------------------------------------------------------------------------------


SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "rectangle": ((0, 0), (12, 0), (12, 12), (0, 12)),
    "triangle": ((6, 0), (12, 12), (0, 12)),
    "octagon": ((4, 0), (8, 0), (12, 4), (12, 8), (8, 12), (4, 12), (0, 8), (0, 4)),
}
"""Corners of the classes' shapes, x and y in twelfths of their width and height, clockwise."""

_COLORS = ((220, 40, 40), (40, 190, 60), (50, 80, 230))
_SHAPES_SIZES = ((320, 240), (240, 320), (288, 288))  # width, height in pixels
_SHAPES_RECIPE = 1  # a change of the files made here needs a new number
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
        """Return x1, y1, x2, y2."""
        return [*self.corners.min(axis=0).tolist(), *self.corners.max(axis=0).tolist()]

    def overlaps(self, other: _Shape) -> bool:
        """Return True if the boxes overlap."""
        return all(self.box[i] < other.box[i + 2] and other.box[i] < self.box[i + 2] for i in (0, 1))

    @property
    def area(self) -> float:
        x, y = self.corners.T
        return abs(int((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())) / 2

    def mask(self, height: int, width: int) -> Bools:
        """Return the pixels whose centre lies within the outline: [H, W]."""
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
    progress: Callable[..., object] = lambda **numbers: None,
) -> Samples:
    """Fill `directory` with `count` images, their masks, `instances.json` and `listing.jsonl`.

    A file depends only on the seed, its number and the photographs; files that exist are kept. Parameters and
    exceptions are those of `make_samples`.
    """
    photos, root = list(load_photos().values()), Path(directory)
    recipe = {"recipe": _SHAPES_RECIPE, "kind": "detection", "count": count, "seed": seed, "photos": len(photos)}
    _claim(root, ("images", "masks"), recipe)

    def make(i: int) -> _Image:
        rng = np.random.default_rng([seed, i])
        pixels_HWC, quality = noisy_crop(photos[i % len(photos)], rng, _SHAPES_SIZES)
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
            write(mask, _image_file(levels_HW, "PNG"))
        num_bytes = image.stat().st_size + mask.stat().st_size
        return _Image(height=height, width=width, shapes=shapes, num_bytes=num_bytes, is_new=is_new)

    images = _make_all(make, count, progress)
    made, total_bytes = sum(image.is_new for image in images), sum(image.num_bytes for image in images)
    total_bytes += write(root / "instances.json", json.dumps(_coco(images)).encode())
    total_bytes += write(root / "listing.jsonl", "".join(map(_line, range(count), images)).encode())
    return Samples(directory=root, count=count, made=made, total_bytes=total_bytes, classes=tuple(SHAPES))


def _draw(rng: np.random.Generator, height: int, width: int) -> list[_Shape]:
    """Draw shapes that do not overlap, one at least."""
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
        if not any(shape.overlaps(other) for other in shapes):
            shapes.append(shape)
        if len(shapes) == wanted:
            break
    return shapes


def _coco(images: list[_Image]) -> dict[str, Any]:
    """Return all images and shapes in COCO's format, whose ids start from 1."""
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
    """Return the image's line of the listing."""
    row = {
        "path": f"images/{i:06d}.jpg",
        "boxes": [shape.box for shape in image.shapes],
        "labels": [list(SHAPES)[shape.label] for shape in image.shapes],
        "polygons": [[shape.corners.reshape(-1).tolist()] for shape in image.shapes],
        "mask": f"masks/{i:06d}.png",
    }
    return json.dumps(row) + "\n"
