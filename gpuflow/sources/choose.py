"""Some images of a directory or a source, for checks that need not see them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpuflow.sources.folder import EXTENSIONS

__all__ = ["images_below", "spread"]


def images_below(directory: Path) -> list[Path]:
    """The images in a directory and below it, by their suffixes; sorted. None where there is no such directory."""
    return sorted(path for path in directory.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())


def spread(total: int, count: int) -> list[int]:
    """At most `count` of the numbers below `total`, evenly spread from the first to the last, ascending."""
    return sorted({int(i) for i in np.linspace(0, max(total - 1, 0), min(total, count))})
