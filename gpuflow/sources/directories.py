"""Walks directories, and expands patterns. Links are followed, but not back to a directory above them."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator

from gpuflow.errors import SourceError

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


def matching(pattern: str, top: str) -> list[str]:
    """The paths that match a pattern of `glob`, sorted, without those that run through a link back to an ancestor.

    Unlike `glob`, it does not follow such links below a `**`: there are exponentially many paths over several of them.

    top: the directory that the pattern's part without wildcards names. Raises SourceError for a directory below a `**`
    that cannot be listed.
    """
    return sorted(path for path in set(_expanded(pattern)) if not _goes_back(path, top))


def _expanded(pattern: str) -> Iterator[str]:
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    place = parts.index("**")
    head, rest = "/".join(parts[:place]), parts[place + 1 :] or ["*"]
    for start in glob.glob(f"{head}/") if place else [""]:
        top = start.rstrip("/") or start or os.curdir
        for directory, _ in walk(top, ancestors(top) - {identity_of(top)}, ()):
            below = directory[len(top) :].lstrip("/")
            yield from _expanded(os.path.join(glob.escape(start + below), *rest))


def _goes_back(path: str, top: str) -> bool:
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
