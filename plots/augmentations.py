"""Draw every stage that changes an image, at three magnitudes: its CPU form, its GPU form, and their difference.

python -m plots.augmentations pictures.npz plots/augmentations

The images come from `experiments/augment/pictures.py`, which names each array `stage/number/magnitude/form`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plots import style

Pixels = NDArray[np.uint8]

_AMPLIFIED = 100
_FORMS = ("CPU", "GPU", "difference")
_CELL, _GAP, _GROUP_GAP = 0.92, 0.05, 0.2
"""An image's width and height in inches, and the space after it, and after the three forms of one magnitude."""
_LABEL, _CAPTION = 2.35, 0.34
"""The width of a stage's name, and the height of what is written below its images, in inches."""
_HEAD, _FOOT, _COLUMN_GAP = 1.35, 0.42, 0.45
_COLUMNS = 2
_DPI = 128
"""Fewer than in other figures, to keep the file small."""


@dataclass(frozen=True, slots=True)
class _Picture:
    """One magnitude of a stage. forms: see `_FORMS`. largest: the largest difference in levels."""

    label: str
    forms: tuple[Pixels, Pixels, Pixels]
    largest: int


def draw(pictures_npz: Path, out_stem: Path) -> list[Path]:
    """Draw pictures.npz as OUT_STEM.svg and OUT_STEM.png. Return their paths."""
    about, stages = _read(pictures_npz)
    rows = -(-len(stages) // _COLUMNS)
    group = len(_FORMS) * (_CELL + _GAP) + _GROUP_GAP
    column = _LABEL + 3 * group
    width = 0.3 + _COLUMNS * column + (_COLUMNS - 1) * _COLUMN_GAP
    height = _HEAD + rows * (_CELL + _CAPTION) + _FOOT
    with style.new_figure(width, height) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        for i, (name, pictures) in enumerate(stages.items()):
            left = 0.3 + i // rows * (column + _COLUMN_GAP)
            top = _HEAD + i % rows * (_CELL + _CAPTION)
            axes.text(left, top + _CELL / 2, name, fontsize=14, fontweight="bold", va="center")
            for number, picture in enumerate(pictures):
                _draw_picture(axes, left + _LABEL + number * group, top, picture, heads=i % rows == 0)
            if len(pictures) == 1:
                note = left + _LABEL + group, top + _CELL / 2
                axes.text(*note, "has no magnitude", fontsize=12, color=style.GRAY, va="center")
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.set_aspect("auto")
        exact = [picture.largest for pictures in stages.values() for picture in pictures]
        subtitle = (
            f"{len(stages)} stages on one photograph. Largest difference of the {len(exact)} pairs: {max(exact)} of "
            f"255 levels; {exact.count(0)} pairs are equal. Differences are drawn {_AMPLIFIED} times as large."
        )
        style.title(figure, "Every augmentation, on the CPU and on the GPU", subtitle)
        foot = f"The GPU forms ran on: {about['gpu']}. mixup and cutmix take a second photograph, in float32."
        figure.text(0.3 / width, 0.14 / height, foot, fontsize=12, color=style.GRAY)
        return style.save(figure, out_stem, _DPI)


def _draw_picture(axes: Any, left: float, top: float, picture: _Picture, *, heads: bool) -> None:
    """Draw the three forms of one magnitude in a row, with the magnitude and the difference below them."""
    for form, (name, pixels) in enumerate(zip(_FORMS, picture.forms, strict=True)):
        x = left + form * (_CELL + _GAP)
        rows, columns = pixels.shape[:2]
        scale = _CELL / max(rows, columns)
        across, down = (_CELL - columns * scale) / 2, (_CELL - rows * scale) / 2
        extent = (x + across, x + _CELL - across, top + _CELL - down, top + down)
        axes.imshow(pixels, extent=extent, interpolation="none")
        if heads:
            axes.text(x + _CELL / 2, top - 0.08, name, fontsize=11, color=style.GRAY, ha="center", va="bottom")
    below = top + _CELL + 0.04
    axes.text(left, below, picture.label, fontsize=11, color=style.INK, va="top")
    right = left + len(_FORMS) * (_CELL + _GAP) - _GAP
    axes.text(right, below, f"max {picture.largest}", fontsize=11, color=style.GRAY, ha="right", va="top")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, list[_Picture]]]:
    """Return what the file says about itself, and the pictures of each stage."""
    with np.load(path, allow_pickle=False) as file:
        if "about" not in file:
            raise ValueError(f"{path} must have the array `about`; make it with experiments/augment/pictures.py")
        about = json.loads(str(file["about"]))
        stages: dict[str, list[_Picture]] = {name: [] for name in about["stages"]}
        for key in file.files:
            name, *rest = key.split("/")
            if rest and rest[-1] == "cpu":
                cpu, gpu = file[key], file[key.removesuffix("cpu") + "gpu"]
                difference = np.abs(np.subtract(cpu, gpu, dtype=np.int16))
                amplified = np.minimum(difference * _AMPLIFIED, 255).astype(np.uint8)
                stages[name].append(_Picture(rest[1], (cpu, gpu, amplified), int(difference.max())))
    return about, stages


if __name__ == "__main__":
    style.main("plots.augmentations", draw)
