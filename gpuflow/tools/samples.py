"""`gpuflow samples`: makes sample JPEGs without a download, from photographs in scikit-image and scikit-learn.

Each photograph is one class. A file depends only on the seed, its number and the photographs: a crop of 55 to 100% of
the sides, resized to one of a few sizes, slightly brighter or darker, with noise. Existing files are kept, so a call
that was interrupted can be repeated to make the rest.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.errors import ConfigError, MissingExtra, Problem
from gpuflow.runtime.cpu_budget import available_threads
from gpuflow.runtime.files import atomic_write

if TYPE_CHECKING:
    from PIL import Image


PHOTOS: dict[str, tuple[str, str]] = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "brick": ("skimage", "data/brick.png"),
    "camera": ("skimage", "data/camera.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "grass": ("skimage", "data/grass.png"),
    "gravel": ("skimage", "data/gravel.png"),
    "hubble": ("skimage", "data/hubble_deep_field.jpg"),
    "moon": ("skimage", "data/moon.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
}
"""Class name -> (package, path inside it). Only files that the packages' wheels contain."""

_PROJECTS = {"PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"}
_SIZES = ((500, 375), (375, 500), (500, 333), (500, 500))  # width, height in pixels
_MARKER = ".samples.json"
_RECIPE = 1  # a change of the pixels made here needs a new number


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
    progress: Callable[[int, int], object] | None = None,
    num_threads: int | None = None,
) -> Samples:
    """Fill `directory` with `count` JPEGs in one folder per class: `coffee/000005.jpg`.

    Args:
        directory: absent, empty, or filled by an earlier call with the same arguments.
        count: number of files, spread evenly over the classes.
        seed: selects the crops.
        progress: called as `progress(files_done, count)` in the caller's thread.
        num_threads: threads that make files; by default one per core that this process may use. Does not change
            the files.

    Raises:
        ConfigError: a parameter is out of range, or the directory holds something else.
        MissingExtra: one of the `samples` packages is not installed.
    """
    root = Path(directory)
    check_numbers(count, seed)
    photos = load_photos()
    classes = tuple(photos)
    claim(root, {"recipe": _RECIPE, "count": count, "seed": seed, "classes": list(classes)})
    for name in classes[:count]:
        (root / name).mkdir(exist_ok=True)

    def make(i: int) -> tuple[bool, int]:
        """File i: whether it is new, and its size in bytes."""
        name = classes[i % len(classes)]
        path = root / name / f"{i:06d}.jpg"
        if path.exists():
            return False, path.stat().st_size
        return True, write(path, _jpeg(photos[name], np.random.default_rng([seed, i])))

    made = total_bytes = 0
    with ThreadPoolExecutor(num_threads or available_threads()) as pool:
        for done, (new, size) in enumerate(pool.map(make, range(count)), start=1):
            made += new
            total_bytes += size
            if progress is not None:
                progress(done, count)
    return Samples(directory=root, count=count, made=made, total_bytes=total_bytes, classes=classes[:count])


def check_numbers(count: int, seed: int) -> None:
    """Raise ConfigError for a count or a seed out of range."""
    for name, value, least in (("count", count, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError([Problem(f"samples.{name}", f"must be >= {least}, got {value}")])


def load_photos() -> dict[str, Image.Image]:
    """The decoded photographs by class name, without those that the installed package does not contain."""
    roots: dict[str, Path] = {}
    for package, project in _PROJECTS.items():
        spec = importlib.util.find_spec(package)  # finds the files without importing the package
        if spec is None or spec.origin is None:
            raise MissingExtra("gpuflow samples", project, "samples")
        roots[package] = Path(spec.origin).parent
    from PIL import Image

    photos = {}
    for name, (package, file) in PHOTOS.items():
        if (path := roots[package] / file).exists():
            with Image.open(path, formats=("JPEG", "PNG")) as image:
                photos[name] = image.convert("RGB")
    return photos


def claim(root: Path, recipe: dict[str, Any]) -> None:
    """Write the marker of this recipe into the directory. Raises ConfigError if that holds something else."""
    marker = root / _MARKER
    if marker.exists():
        found = json.loads(marker.read_text())
        differ = [key for key, value in recipe.items() if found.get(key) != value]
        if differ:
            other = ", ".join(
                f"{key}={found[key]!r} (not {recipe[key]!r})" if key in found else f"no {key} (not {recipe[key]!r})"
                for key in differ
            )
            raise _occupied(root, f"samples made with {other}")
        return
    root.mkdir(parents=True, exist_ok=True)
    if (entry := min(root.iterdir(), default=None)) is not None:
        raise _occupied(root, repr(entry.name))
    write(marker, json.dumps(recipe).encode())


def _occupied(root: Path, found: str) -> ConfigError:
    rule = "must be absent, empty or filled by the same command before"
    return ConfigError([Problem(str(root), f"{rule}, but holds {found}; name another directory or remove this one")])


def write(path: Path, data: bytes) -> int:
    """Write a file and return its size in bytes."""
    with atomic_write(path) as file:
        file.write(data)
    return len(data)


def _jpeg(photo: Image.Image, rng: np.random.Generator) -> bytes:
    """One encoded crop."""
    return encoded(*noisy_crop(photo, rng, _SIZES))


def noisy_crop(photo: Image.Image, rng: np.random.Generator, sizes: Sequence[tuple[int, int]]) -> tuple[Bytes, int]:
    """The pixels of one crop, resized to one of these sizes (width, height), and the quality to encode it with.

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
    """Pixels as a JPEG."""
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels_HWC).save(data, "JPEG", quality=quality, subsampling="4:2:0")
    return data.getvalue()
