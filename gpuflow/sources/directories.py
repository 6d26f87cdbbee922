"""Walks directories. Links are followed, but not back to a directory above them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from gpuflow.errors import SourceError

__all__ = ["Identity", "ancestors", "cannot_be_listed", "goes_back", "identity_of", "is_directory", "walk"]

Identity = tuple[int, int]
"""The device and the inode of a directory, the same by any path."""


def ancestors(root: str) -> frozenset[Identity]:
    """A directory and all above it."""
    path = os.path.realpath(root)
    found = {identity_of(path)}
    while (parent := os.path.dirname(path)) != path:
        path = parent
        found.add(identity_of(path))
    return frozenset(found)


def identity_of(directory: str) -> Identity:
    try:
        status = os.stat(directory)
    except OSError as fault:
        raise cannot_be_listed(directory, fault) from fault
    return status.st_dev, status.st_ino


def walk(top: str, above: frozenset[Identity], extensions: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield each directory, `top` and all below it, with its files. Links are followed, but not back to an ancestor.

    Names that begin with a dot are left out.

    above: the ancestors of `top`. extensions: see `is_directory`. Raises SourceError for a directory that cannot be
    listed, because its files would otherwise be missing without an error.
    """
    waiting = [(top, above)]
    while waiting:
        directory, above = waiting.pop()
        identity = identity_of(directory)
        if identity in above:
            continue
        files = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if is_directory(entry, extensions):
                        waiting.append((f"{directory}/{entry.name}", above | {identity}))
                    else:
                        files.append(entry.name)
        except OSError as fault:
            raise cannot_be_listed(directory, fault) from fault
        yield directory, files


def goes_back(path: str, top: str) -> bool:
    """Whether a path below `top` runs through a link to a directory above that link."""
    top = top or os.curdir
    above = set(ancestors(top))
    *below, _ = os.path.relpath(path, top).split(os.sep)
    for depth in range(1, len(below) + 1):
        identity = identity_of(os.path.join(top, *below[:depth]))
        if identity in above:
            return True
        above.add(identity)
    return False


def is_directory(entry: os.DirEntry[str], extensions: tuple[str, ...]) -> bool:
    """Whether an entry, or what a link leads to, is a directory. A link that leads nowhere is none.

    extensions: an entry that cannot be examined counts as a file if its name ends with one of these.
    """
    try:
        return entry.is_dir()
    except OSError as fault:
        if fault.errno in (errno.ELOOP, errno.ENOTDIR) or entry.name.lower().endswith(extensions):
            return False
        raise


def cannot_be_listed(directory: str, fault: OSError) -> SourceError:
    reason = (fault.strerror or str(fault)).lower()
    return SourceError(f"{directory}: directory must be readable, got: {reason}; make it readable or remove it")
