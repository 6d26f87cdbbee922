"""The picture of all augmentations: the same bytes from the same file, nothing clipped, a located error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plots import augmentations


def pictures(path: Path) -> Path:
    """Two stages, of which one has a single picture, and one a difference of two levels and other sides."""
    level = np.full((12, 12, 3), 90, np.uint8)
    images = {"flip/0//cpu": level, "flip/0//gpu": level}
    for number in range(3):
        images[f"pad/{number}/by {number}/cpu"] = np.full((8, 16, 3), 50, np.uint8)
        images[f"pad/{number}/by {number}/gpu"] = np.full((8, 16, 3), 50 + number, np.uint8)
    about = np.array(json.dumps({"gpu": "a device", "stages": ["flip", "pad"]}))
    np.savez(path, about=about, **images)  # type: ignore[arg-type]
    return path


def test_the_same_bytes_and_nothing_clipped(tmp_path: Path) -> None:
    path = pictures(tmp_path / "pictures.npz")
    first, second = (augmentations.draw(path, tmp_path / name / "figure") for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    texts = set(re.findall(r"<!-- (.*?) -->", first[0].read_text()))
    assert {"flip", "pad", "by 1", "max 0", "max 2", "has no magnitude"} <= texts
    with Image.open(first[1]) as image:
        ink = (np.asarray(image.convert("RGB")) != 255).any(axis=2)
    ink[8:-8, 8:-8] = False
    assert not ink.any()


def test_another_file_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"other.npz must have the array `about`; make it with"):
        augmentations.draw(tmp_path / "other.npz", tmp_path / "figure")
