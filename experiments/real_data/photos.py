"""Makes photographs of several kinds for measurements: `python experiments/real_data/photos.py KIND OUT`.

A photograph is a crop of a picture that scikit-image or scikit-learn ships, or of a picture in the folder that --from
names, with other brightness and noise. Its pixels and its encoding depend only on the kind, the seed, its number and
the pictures. Each file stands in its folder under several names (hard links), so that an epoch lasts.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["KINDS", "Kind", "Plan", "find_pictures", "is_made", "make_photos", "plan"]

COUNT, NAMES = 4096, 16
_SHAPES = ((500, 375), (375, 500), (500, 333), (500, 500))
_RATIOS = ((4, 3), (3, 2), (1, 1), (16, 9), (3, 4), (2, 3), (9, 16))
"""Width and height of the kinds with one size, and the ratios of width to height of cameras and phones."""
_MEDIAN_SIDE, _SPREAD, _SIDES = 500, 0.5, (80, 3000)
"""The longer side in pixels of the kinds with many sizes: median, standard deviation of its logarithm, limits."""
_TURNS = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""The orientations of cameras and phones, and how an upright image is stored for each."""
_ORIENTATION_TAG = 0x0112
_CLASSES = 20
_MARKER = ".photos.json"
_RECIPE = 1  # a change of the photographs made here needs a new number
_PICTURES = {
    "skimage": (
        "data/astronaut.png",
        "data/brick.png",
        "data/chelsea.png",
        "data/coffee.png",
        "data/grass.png",
        "data/gravel.png",
        "data/hubble_deep_field.jpg",
        "data/ihc.png",
        "data/motorcycle_left.png",
        "data/motorcycle_right.png",
        "data/retina.jpg",
        "data/rocket.jpg",
    ),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
}
"""Files that the wheels of these packages contain."""
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Which shares of a kind's files differ from a baseline JPEG in YCbCr 4:2:0 of about 500x375 pixels.

    many_sizes: whether sizes and ratios vary. yuv444, yuv422: shares of these chroma samplings. turned: the share that
    EXIF data turn; if there are any, the other files have EXIF data, too. quality: lowest and highest quality of the
    encoder.
    """

    many_sizes: bool = False
    yuv444: float = 0.0
    yuv422: float = 0.0
    progressive: float = 0.0
    gray: float = 0.0
    png: float = 0.0
    cmyk: float = 0.0
    turned: float = 0.0
    quality: tuple[int, int] = (85, 94)


KINDS = {
    "same": Kind(),
    "samplings": Kind(yuv444=0.15, yuv422=0.05),
    "sizes": Kind(many_sizes=True),
    "progressive": Kind(progressive=0.03),
    "progressive20": Kind(progressive=0.2),
    "turned": Kind(turned=0.5),
    "web": Kind(
        many_sizes=True,
        yuv444=0.15,
        yuv422=0.05,
        progressive=0.03,
        gray=0.01,
        png=0.005,
        cmyk=0.002,
        quality=(70, 97),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one file will be. crop: the part of the picture, as fractions: size, left, top. mode: of Pillow.
    orientation: of the EXIF data, 1 to 8; 0 for none. width, height: upright."""

    width: int
    height: int
    format: str
    mode: str
    sampling: str
    progressive: bool
    quality: int
    orientation: int
    crop: tuple[float, float, float]
    gain: float


def plan(kind: Kind, seed: int, number: int) -> Plan:
    """The plan of a file. Each draw is made for every kind, so that a number shows the same crop in all of them."""
    rng = np.random.default_rng([seed, number])
    crop = rng.uniform(0.55, 1.0), rng.random(), rng.random()
    gain, side, shape, ratio = (
        rng.uniform(0.8, 1.2),
        rng.normal(),
        rng.integers(len(_SHAPES)),
        rng.integers(len(_RATIOS)),
    )
    quality = int(rng.integers(kind.quality[0], kind.quality[1] + 1))
    chroma, scans, other, turn = rng.random(4).tolist()
    orientation = int(rng.choice(list(_TURNS))) if turn < kind.turned else 1
    width, height = _SHAPES[shape]
    if kind.many_sizes:
        longest = float(np.clip(_MEDIAN_SIDE * np.exp(_SPREAD * side), *_SIDES))
        scale = longest / max(_RATIOS[ratio])
        width, height = (round(scale * part) for part in _RATIOS[ratio])
    sampling = "4:4:4" if chroma < kind.yuv444 else "4:2:2" if chroma < kind.yuv444 + kind.yuv422 else "4:2:0"
    mode = "L" if other < kind.gray else "CMYK" if other < kind.gray + kind.cmyk else "RGB"
    is_png = kind.gray + kind.cmyk <= other < kind.gray + kind.cmyk + kind.png
    return Plan(
        width=width,
        height=height,
        format="PNG" if is_png else "JPEG",
        mode=mode,
        sampling=sampling if mode == "RGB" and not is_png else "",
        progressive=scans < kind.progressive and not is_png,
        quality=quality,
        orientation=orientation if kind.turned else 0,
        crop=crop,
        gain=gain,
    )


def find_pictures(folder: Path | None) -> list[Path]:
    """The pictures that photographs are cut from: those of a folder, or those in scikit-image and scikit-learn.

    Raises SystemExit if there are none.
    """
    if folder is not None:
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
        if not found:
            raise SystemExit(f"--from {folder} must be a folder with pictures ({', '.join(_ENDINGS)}), found none")
        return found
    found = []
    for package, files in _PICTURES.items():
        spec = importlib.util.find_spec(package)  # finds the files without importing the package
        if spec is not None and spec.origin is not None:
            found += [path for file in files if (path := Path(spec.origin).parent / file).exists()]
    if not found:
        raise SystemExit(
            "making photographs needs pictures, and neither scikit-image nor scikit-learn is installed: "
            "pip install scikit-image scikit-learn, or name a folder of your own pictures: --from DIR"
        )
    return found


def is_made(out: Path) -> bool:
    """Whether `make_photos` filled this folder."""
    return (out / _MARKER).exists()


def make_photos(
    kind: str, out: Path, *, count: int = COUNT, names: int = NAMES, seed: int = 0, source: Path | None = None
) -> int:
    """Fill the folder `out` with `count` files of a kind, each under `names` names, in a folder for each class.

    A folder that an earlier call with the same arguments filled is kept. An interrupted call leaves no folder `out`.

    Returns:
        The number of files made now.

    Raises SystemExit if the folder holds something else, or if there are no pictures.
    """
    recipe: dict[str, Any] = {"recipe": _RECIPE, "kind": kind, "count": count, "names": names, "seed": seed}
    recipe["from"] = None if source is None else str(source.resolve())
    if out.exists():
        found = json.loads((out / _MARKER).read_text()) if is_made(out) else None
        if found == recipe:
            return 0
        raise SystemExit(
            f"{out} must be absent or hold photographs of {recipe}, got {found}; remove it or name another"
        )
    pictures = find_pictures(source)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for number in range(min(_CLASSES, len(pictures), count)):
        (partial / _class_name(number)).mkdir(parents=True)
    write = functools.partial(_write, KINDS[kind], partial, pictures, names, seed)
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(write, range(count), chunksize=max(1, min(16, count // cores))):
            pass
    (partial / _MARKER).write_text(json.dumps(recipe))
    partial.rename(out)
    return count


def _class_name(number: int) -> str:
    return f"class_{number % _CLASSES:02d}"


def _write(kind: Kind, out: Path, pictures: Sequence[Path], names: int, seed: int, number: int) -> None:
    """Make one file and its other names."""
    place = number % len(pictures)
    what = plan(kind, seed, number)
    ending = what.format.lower().replace("jpeg", "jpg")
    path = out / _class_name(place) / f"{number:06d}.{ending}"
    path.write_bytes(encode(_picture(pictures[place]), what, np.random.default_rng([seed, number, 1])))
    for name in range(1, names):
        os.link(path, path.with_name(f"{number:06d}_{name:02d}.{ending}"))


@functools.lru_cache(maxsize=16)
def _picture(path: Path) -> Image.Image:
    with Image.open(path, formats=["JPEG", "PNG", "WEBP", "BMP", "TIFF"]) as image:
        return image.convert("RGB")


def encode(picture: Image.Image, what: Plan, noise: np.random.Generator) -> bytes:
    """Make the file of a plan: cut, resize, brighten or darken, add noise, encode."""
    size, left, top = what.crop
    width, height = max(int(picture.width * size), 1), max(int(picture.height * size), 1)
    x, y = round(left * (picture.width - width)), round(top * (picture.height - height))
    crop = picture.resize((what.width, what.height), Image.Resampling.LANCZOS, box=(x, y, x + width, y + height))
    levels = [min(int(level * what.gain), 255) for level in range(256)]
    pixels_HWC = np.asarray(crop.point(levels * 3), np.int16)
    noisy_HWC = pixels_HWC + noise.integers(-7, 8, pixels_HWC.shape, dtype=np.int8)
    image = Image.fromarray(noisy_HWC.clip(0, 255).astype(np.uint8)).convert(what.mode)
    if what.orientation in _TURNS:
        image = image.transpose(_TURNS[what.orientation])
    encoded = io.BytesIO()
    if what.format == "PNG":
        image.save(encoded, "PNG")
    else:
        options: dict[str, Any] = {"subsampling": what.sampling} if what.sampling else {}
        if what.orientation:
            options["exif"] = exif = Image.Exif()
            exif[_ORIENTATION_TAG] = what.orientation
        image.save(encoded, "JPEG", quality=what.quality, progressive=what.progressive, **options)
    return encoded.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=COUNT, help="files (default: %(default)s)")
    parser.add_argument("--names", type=int, default=NAMES, help="names of each file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="a folder of your own pictures")
    options = parser.parse_args()
    made = make_photos(
        options.kind, options.out, count=options.count, names=options.names, seed=options.seed, source=options.source
    )
    print(f"{options.out}: {options.count} files of the kind {options.kind}, {made} new, {options.names} names each")


if __name__ == "__main__":
    main()
