"""Chooses some images of a directory or a source, for checks that do not need all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpuflow.sources.folder import EXTENSIONS


def images_below(directory: Path) -> list[Path]:
    """The paths of all images below a directory, found by suffix and sorted. Empty if there is no such directory."""
    return sorted(path for path in directory.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())


def spread(total: int, count: int) -> list[int]:
    """At most `count` of the numbers below `total`, spread evenly from the first to the last, ascending."""
    return sorted({int(i) for i in np.linspace(0, max(total - 1, 0), min(total, count))})
