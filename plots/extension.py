"""Draws images per second of an affine warp as bars, with the ratio to cv2.warpAffine. One panel per device.

python -m plots.extension experiments/extension/results.csv OUT_STEM
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import loader_cpu, style


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths."""
    heading = "Images per second, warped"
    return loader_cpu.draw(results_path, out_stem, heading=heading, baseline="cv2", one_scale=False)


if __name__ == "__main__":
    style.main(draw, "plots.extension", sys.argv[1:])
