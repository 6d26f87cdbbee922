"""Local paths: walks directories, expands patterns, and suggests what a path that does not exist was meant to be.

Links are followed, but not back to a directory above them.
"""

from __future__ import annotations

import difflib
import errno
import glob
import os
from collections.abc import Iterator

from gpuflow.errors import SourceError
from gpuflow.sources.spec import SourceSpec
from gpuflow.sources.storage import is_remote

Identity = tuple[int, int]
"""The device and the inode of a directory, the same by any path."""


def ancestors(root: str) -> frozenset[Identity]:
    """Return a directory and all above it."""
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
    """Expand a pattern of `glob` to paths, sorted, without those that run through a link back to an
    ancestor.

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
    head = "/".join(parts[:place])
    rest = parts[place + 1 :] or ["*"]
    for start in glob.glob(f"{head}/") if place else [""]:
        top = start.rstrip("/") or start or os.curdir
        for directory, _ in walk(top, ancestors(top) - {identity_of(top)}, ()):
            below = directory[len(top) :].lstrip("/")
            yield from _expanded(os.path.join(glob.escape(start + below), *rest))


def _goes_back(path: str, top: str) -> bool:
    """Return True if a path below `top` runs through a link to a directory above that link."""
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
    """Return True if an entry, or what a link leads to, is a directory. A link that leads nowhere is none.

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


def missing_path(path: str) -> str:
    """Return a clause for a local path that does not exist: suggests a similar name, or says where relative paths
    start."""
    if "$" in path:
        return "; variables such as $HOME are not replaced, write the path itself"
    parent, name = os.path.split(path.rstrip("/"))
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    siblings = os.listdir(parent or ".") if os.access(parent or ".", os.R_OK) else []
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        rest = path.rstrip("/")[len(os.path.join(parent, name)) :]
        return f"; did you mean {os.path.join(parent, close[0]) + rest!r}?"
    return "; check the path" if os.path.isabs(path) else f"; relative paths start from {os.getcwd()}"


def missing_source(spec: SourceSpec) -> str:
    """Return what a source names that does not exist, and a hint; empty if it exists, or is not a single local path."""
    path = spec.where
    if not spec.is_path or is_remote(path) or any(mark in path for mark in "*?[{"):
        return ""
    return missing_file(path)


def missing_file(path: str) -> str:
    """Return a local path that does not exist, and a hint; empty if it exists."""
    return "" if os.path.exists(os.path.expanduser(path)) else f"{path!r}{missing_path(path)}"
