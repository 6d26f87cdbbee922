"""Makes data that no page of the documentation made: names with spaces, all sizes, a damaged file, masks, captions."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

CLASSES = {"Acer": (200, 60, 60), "birch, silver": (60, 200, 60), "zelkova": (60, 60, 200)}
"""The colour of each class."""
BAD = "photos/Acer/tree03_1.jpg"


def photograph(rng: np.random.Generator, colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return noise of a colour, of any size."""
    height, width = rng.integers(90, 300, 2)
    image: NDArray[np.uint8] = np.clip(np.array(colour) + rng.normal(0, 25, (height, width, 1)), 0, 255).astype("uint8")
    return image


def write(path: Path, image: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), image[..., ::-1] if image.ndim == 3 else image)


def make_trees(root: Path, groups: int = 6) -> None:
    """Make `photos`, with two photographs a group in each class, of which one is damaged."""
    rng = np.random.default_rng(0)
    for name, colour in CLASSES.items():
        for tree in range(groups):
            for number, extension in enumerate(("png", "jpg")):
                file = root / "photos" / name / f"tree{tree:02d}_{number}.{extension}"
                write(file, photograph(rng, colour))
    damaged = root / BAD
    damaged.write_bytes(damaged.read_bytes()[:300])


def make_scans(root: Path) -> None:
    """Make `scans`: images with masks of three classes and 255, one image without a mask."""
    rng = np.random.default_rng(1)
    for number in range(11):
        image = photograph(rng, (90, 90, 90))
        height, width = image.shape[:2]
        mask = np.zeros((height, width), np.uint8)
        for level, colour in ((1, (220, 40, 40)), (2, (40, 40, 220))):
            y, x = rng.integers(0, height - 40), rng.integers(0, width - 40)
            image[y : y + 40, x : x + 40], mask[y : y + 40, x : x + 40] = colour, level
        mask[:2] = 255
        write(root / f"scans/images/slide-{number}.jpg", image)
        if number:
            write(root / f"scans/masks/slide-{number}.png", mask)


def make_captions(root: Path) -> None:
    """Make `captions.csv` and its images, one of them damaged."""
    rng = np.random.default_rng(2)
    texts = ("A red leaf, seen from below", "two Bäume", "moss", "the bark of an old oak")
    lines = ["path,caption"]
    for number in range(9):
        write(root / f"leaves/{number}.jpg", photograph(rng, (90, 160, 90)))
        lines.append(f'leaves/{number}.jpg,"{texts[number % 4]}"')
    (root / "leaves/4.jpg").write_bytes(b"no image")
    (root / "captions.csv").write_text("\n".join(lines) + "\n")
