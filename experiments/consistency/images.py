"""Makes the images of three tasks from the pictures that scikit-image and scikit-learn ship, without any download.

hairlines     class 1: one to three lines 1 pixel wide; class 0: soft wide strokes. On a smooth background.
marks         the same lines and strokes, which change the hue alone: their luminance is the background's.
photographs   crops of the pictures; the class is the picture.

The parts `train` and `test` show different places: the left 60% and the right 35% of each picture. An image depends on
its task, seed, part and number only.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "real_data"))
from photos import find_pictures

__all__ = ["PARTS", "TASKS", "make_images"]

TASKS = ("hairlines", "marks", "photographs")
PARTS = {"train": (0.0, 0.6), "test": (0.65, 1.0)}
"""Maps each part to the columns of a picture that it shows, as fractions of the width."""
SIDE = 320
_CONTRAST, _CHROMA = (22, 60), (14, 40)
"""The lowest and highest change of levels by a line, and of a chroma channel by a mark."""
_CB, _CR = 1.772, 1.402
"""JPEG's blue and red for one level of Cb and Cr."""

Pixels = NDArray[Any]


def make_images(folder: Path, task: str, part: str, *, count: int, seed: int) -> None:
    """Write `count` JPEGs in YCbCr 4:2:0 of 320x320 pixels into folders of their classes, unless the folder exists."""
    if folder.exists():
        return
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in find_pictures(None)]
    partial = folder.with_name(f"{folder.name}.partial")
    for number in range(count):
        rng = np.random.default_rng([TASKS.index(task), seed, list(PARTS).index(part), number])
        label = number % (len(pictures) if task == "photographs" else 2)
        picture = pictures[number % len(pictures) if task == "photographs" else number // 2 % len(pictures)]
        pixels = _crop(picture, PARTS[part], rng)
        if task == "photographs":
            pixels = pixels * rng.uniform(0.8, 1.2)
        else:
            smooth = cv2.GaussianBlur(pixels, (0, 0), 8)
            pixels = (smooth - 128) * rng.uniform(0.5, 0.9) + 128 + rng.uniform(-20, 20)
            change = _change_of_hue if task == "marks" else _change_of_level
            pixels = pixels + _strokes(rng, thin=label == 1)[..., None] * change(rng)
        noisy = pixels + rng.normal(0, 2, pixels.shape)
        path = partial / f"class_{label:02d}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_encoded(noisy))
    partial.rename(folder)


def _crop(picture: NDArray[np.uint8], columns: tuple[float, float], rng: np.random.Generator) -> Pixels:
    height, width = picture.shape[:2]
    left, right = (int(fraction * width) for fraction in columns)
    side = int(rng.uniform(0.5, 1) * min(right - left, height))
    x, y = int(rng.integers(left, right - side + 1)), int(rng.integers(0, height - side + 1))
    smaller = cv2.INTER_AREA if side > SIDE else cv2.INTER_CUBIC
    resized: Pixels = cv2.resize(picture[y : y + side, x : x + side], (SIDE, SIDE), interpolation=smaller)
    return resized.astype(np.float32)


def _strokes(rng: np.random.Generator, *, thin: bool) -> Pixels:
    """Return a mask of one to three curves: 1 pixel wide, or 5 pixels and blurred."""
    mask = np.zeros((SIDE, SIDE), np.float32)
    t = np.linspace(0, 1, 60)[:, None]
    for _ in range(rng.integers(1, 4)):
        a, b, c = rng.uniform(0, SIDE, (3, 2))
        points = (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c
        corners: Any = (points * 16).astype(np.int32)
        cv2.polylines(mask, [corners], False, 1.0, 1 if thin else 5, cv2.LINE_AA, 4)
    return mask if thin else np.asarray(cv2.GaussianBlur(mask, (0, 0), 3), np.float32)


def _change_of_level(rng: np.random.Generator) -> Pixels:
    return np.asarray(rng.choice([-1, 1]) * rng.uniform(*_CONTRAST) * rng.uniform(0.5, 1, 3), np.float32)


def _change_of_hue(rng: np.random.Generator) -> Pixels:
    """Return a change of RGB towards a random hue that leaves JPEG's luma as it is."""
    angle, size = rng.uniform(0, 2 * np.pi), rng.uniform(*_CHROMA)
    cb, cr = size * np.cos(angle), size * np.sin(angle)
    red, blue = _CR * cr, _CB * cb
    return np.asarray([red, -(0.299 * red + 0.114 * blue) / 0.587, blue], np.float32)


def _encoded(pixels: Pixels) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=92, subsampling="4:2:0")
    return encoded.getvalue()
