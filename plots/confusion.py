"""Draws a confusion matrix: for each label (row), the share of its samples that are predicted as each class (column).

python -m plots.confusion confusion.csv OUT_STEM
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from . import style

_NAMED, _NUMBERED = 40, 16
"""The most classes that are named at the axes, and whose cells have numbers."""


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw confusion.csv as OUT_STEM.svg and OUT_STEM.png. Return their paths."""
    with results_path.open(newline="") as file:
        header, *rows = csv.reader(file)
    names, counts = header[1:], np.array([row[1:] for row in rows], dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(14.0, max(6.0, 0.3 * len(names) + 4))
    with style.new_figure(side, side) as figure:
        axes = figure.add_axes((0.25, 0.2, 0.7, 0.66))
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_xlabel("predicted")
        axes.set_ylabel("label")
        if len(names) <= _NAMED:
            short = [name if len(name) <= 22 else f"{name[:20]}..." for name in names]
            axes.set_xticks(range(len(names)), short, rotation=90, fontsize=10)
            axes.set_yticks(range(len(names)), short, fontsize=10)
        if len(names) <= _NUMBERED:
            for (row, column), count in np.ndenumerate(counts):
                color = "white" if shares[row, column] > 0.5 else style.INK
                axes.text(column, row, str(count), ha="center", va="center", fontsize=10, color=color)
        right, total = int(counts.trace()), int(counts.sum())
        text = (
            f"{right / max(1, total):.1%} of {total:,} samples are right; darker: a larger share of the label's samples"
        )
        style.title(figure, "Predictions by label", text)
        return style.save(figure, out_stem)


if __name__ == "__main__":
    style.main("plots.confusion", draw)
