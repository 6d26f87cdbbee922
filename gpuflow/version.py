"""Reads the version of this package, and the entry points of all installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
import sys

__version__ = importlib.metadata.version("gpuflow")


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a group. All installed packages are read once for each `sys.path`.

    Examples:
        >>> entry_points("console_scripts")["gpuflow"].value
        'gpuflow.cli:main'
    """
    return _read(group, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _read(group: str, path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=group)
