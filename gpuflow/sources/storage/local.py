"""Reads files of this machine's file systems, with as few system calls as possible, and walks directories.

Reading is the loader's hot path. A file costs open, fstat, pread straight into the caller's buffer, and close. C code
does that for all files of a call, without Python's interpreter. Links are followed, but not back to a directory above
them.
"""

from __future__ import annotations

import difflib
import errno
import glob
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from stat import S_IFDIR, S_IFMT, S_IFREG
from typing import TypeVar, final

import numpy as np

from gpuflow.arrays import Array, Bytes
from gpuflow.errors import SourceError, is_system_fault, system_fault
from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.sources.storage.base import Allocate, Paths, Payload, ReadAt, Shard, lay_out

T = TypeVar("T")

LOCAL_DELAYS = (0.0, 0.05, 0.1, 0.2)
"""Seconds before each attempt to read a file of this machine."""

_OPENED_IN_ADVANCE = 32
"""Number of files that one call has open at most; a larger chunk opens each further file when it reads it."""

_PIECE = np.dtype([(name, np.int64) for name in ("fault", "descriptor", "start", "size", "offset", "done", "file")])
"""A whole file, or a range of an open one, as `struct piece` in read.c says."""

_PENDING, _DIRECTORY, _IRREGULAR, _EMPTY, _, _CHANGED = range(-1, -7, -1)
"""What is wrong with a piece, as in read.c."""

_NEW = np.array((_PENDING, -1, 0, 0, 0, 0, 0), _PIECE)

_TEXTS = {_DIRECTORY: "is a directory", _IRREGULAR: "not a regular file", _EMPTY: "empty file"}

_open_files = function("gpuflow_open_files", *[POINTER] * 4, INTEGER, INTEGER, result=INTEGER)
_read_files = function("gpuflow_read_files", *[POINTER] * 4, INTEGER, POINTER, result=INTEGER)
_read_ranges = function("gpuflow_read_ranges", POINTER, INTEGER, POINTER, result=INTEGER)

_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a named pipe must not wait for its writer

PERMANENT = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file",
    errno.EISDIR: "is a directory",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: "too many symbolic links",
    errno.ENAMETOOLONG: "file name too long",
}
"""Errors of system calls that stay, and what they say of the file."""


def _current_directory() -> bytes:
    try:
        return os.getcwdb()
    except FileNotFoundError:  # it was deleted
        return b""


@final
class LocalStorage:
    """Files on this machine, or on a network file system that is mounted here.

    base: the directory that relative paths start from, also after the process has changed to another one; by default
    the current one.
    """

    remote = False

    def __init__(self, base: bytes | None = None) -> None:
        self._base = os.path.join(_current_directory(), b"") if base is None else base
        self._pool = _FilePool(self._base)

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[bytes]]:
        return LocalStorage, (self._base,)  # a pickled copy in another process opens its own files

    def place(self, path: str) -> str:
        """Return where a path is, also after the process has changed to another directory."""
        return os.path.join(os.fsdecode(self._base), path)

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        names = paths if isinstance(paths, Paths) else Paths(b"", b"\0".join([*paths, b""]))
        pieces = _NEW.repeat(len(names))
        files = self._base, names.prefix, names.text, pieces.ctypes.data, len(pieces)
        try:
            _run_step(lambda _: _open_files(*files, _OPENED_IN_ADVANCE), pieces)
            buffer = _placed(pieces, allocate)
            _run_step(lambda _: _read_files(*files, buffer.ctypes.data), pieces)
        finally:
            for descriptor in pieces["descriptor"].tolist():
                if descriptor >= 0:
                    os.close(descriptor)
        return _payload(buffer, pieces, lambda i: os.fsdecode(paths[i]), "ends")

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        pieces = _NEW.repeat(len(sizes))
        pieces["start"], pieces["size"] = starts, sizes
        pieces["fault"][pieces["size"] == 0] = _EMPTY
        buffer = _placed(pieces, allocate)

        def read_some(items: Sequence[int]) -> int:
            files: dict[int, _OpenFile] = {}  # by the identity of the shard: to hash its value would take longer
            try:
                for i in items:
                    if id(shards[i]) not in files:
                        files[id(shards[i])] = self._pool.acquire(shards[i])
                pieces["file"][items] = [files[id(shards[i])].address for i in items]
                failed: int = _read_ranges(pieces.ctypes.data, len(pieces), buffer.ctypes.data)
                for i in items if failed else ():
                    files[id(shards[i])].broken |= bool(fault := pieces["fault"][i])
                    if fault == _CHANGED:
                        raise shards[i].changed(int(pieces["done"][i]))
            finally:
                for file in files.values():
                    self._pool.release(file)
            return failed

        def read_all(items: Sequence[int]) -> int:
            parts = range(0, len(items), _OPENED_IN_ADVANCE)
            return sum([read_some(items[first : first + _OPENED_IN_ADVANCE]) for first in parts])

        _run_step(read_all, pieces)
        return _payload(buffer, pieces, lambda i: shards[i].path, "its shard ends")

    def load(self, path: str) -> bytes:
        try:
            return retry(Path(path).read_bytes)
        except OSError as fault:
            raise SourceError(f"{path}: {_reason(fault)}; check that it can be read") from fault

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        return [self._inspect(path) for path in paths]

    def _inspect(self, path: str) -> Shard | str:
        try:
            status = retry(lambda: os.stat(self.place(path)))
        except OSError as fault:
            return _reason(fault)
        if S_IFMT(status.st_mode) != S_IFREG:
            return "is a directory" if S_IFMT(status.st_mode) == S_IFDIR else "not a regular file"
        stamp = str(status.st_mtime_ns)
        made = str(status.st_ctime_ns)
        return Shard(path=path, size=status.st_size, stamp=stamp, made=made)

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        def scan_one(shard: Shard) -> T:
            descriptor = os.open(shard.path, _READ_ONLY)
            try:
                try:
                    return scanner(shard, lambda offset, size: os.pread(descriptor, size, offset))
                finally:  # which explains what else may be wrong with it
                    status = os.fstat(descriptor)
                    if (status.st_size, str(status.st_mtime_ns)) != (shard.size, shard.stamp):
                        raise shard.changed(status.st_size)
            finally:
                os.close(descriptor)

        for shard in shards:
            try:
                found = retry(partial(scan_one, shard))
            except OSError as fault:
                raise SourceError(f"{shard.path}: {_reason(fault)}; check that it can be read") from fault
            yield found

    def close(self) -> None:
        self._pool.close()


class _OpenFile:
    """A file descriptor, the number of calls that are reading from it, and whether a read from it failed.

    address: of `struct open_file` in read.c.
    """

    __slots__ = ("_state", "address", "broken", "descriptor", "key", "users")

    def __init__(self, key: Shard, descriptor: int) -> None:
        self.key = key
        self.descriptor = descriptor
        self.users = 0
        self.broken = False
        self._state = np.array([descriptor, key.size, int(key.stamp)], np.int64)
        self.address = self._state.ctypes.data


@final
class _FilePool:
    """Open shards, shared by threads. It keeps at most 32 idle ones and closes the least recently used first.

    base: the directory that relative paths start from, with a slash at its end.
    """

    def __init__(self, base: bytes) -> None:
        self._base = base
        self._limit = 32
        self._lock = threading.Lock()
        self._files: OrderedDict[Shard, _OpenFile] = OrderedDict()

    def acquire(self, shard: Shard) -> _OpenFile:
        with self._lock:
            file = self._files.get(shard)
            if file is not None:
                file.users += 1
                self._files.move_to_end(shard)
                return file
        try:
            opened = _OpenFile(shard, os.open(os.path.join(self._base, os.fsencode(shard.path)), _READ_ONLY))
        except OSError as fault:
            return _OpenFile(shard, -(fault.errno or errno.EIO))  # not kept: it has no user
        with self._lock:
            file = self._files.setdefault(shard, opened)
            file.users += 1
        if file is not opened:
            os.close(opened.descriptor)
        return file

    def release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if file.broken and self._files.get(file.key) is file:
                del self._files[file.key]
            if self._files.get(file.key) is not file:
                if not file.users:
                    os.close(file.descriptor)
                return
            if len(self._files) > self._limit:
                idle = next((other for other in self._files.values() if not other.users), None)
                if idle is not None:
                    del self._files[idle.key]
                    os.close(idle.descriptor)

    def close(self) -> None:
        """Close all files. One that a thread still reads, or opens later, is closed when no thread reads from it."""
        with self._lock:
            self._limit = 0
            for file in self._files.values():
                if not file.users:
                    os.close(file.descriptor)
            self._files.clear()


def _is_permanent(fault: Exception) -> bool:
    """Return True if another attempt would fail, too: the file is not there or must not be read, or no read has
    failed."""
    return not isinstance(fault, OSError) or fault.errno in PERMANENT


def retry(action: Callable[[], T], permanent: Callable[[Exception], bool] = _is_permanent) -> T:
    """Call `action` until it succeeds, at most once for each delay. Exceptions of which `permanent` is true are raised
    immediately, others after the last attempt.

    Examples:
        >>> retry(lambda: 3)
        3
    """
    for delay in LOCAL_DELAYS[1:]:
        try:
            return action()
        except Exception as fault:  # libraries, such as pyarrow, raise exceptions of other kinds
            if permanent(fault):
                raise
        time.sleep(delay)
    return action()


def _reason(fault: OSError) -> str:
    if fault.errno in PERMANENT:
        return PERMANENT[fault.errno]
    return (fault.strerror or str(fault)).lower() + f"; tried {len(LOCAL_DELAYS)} times"


def _placed(pieces: Array, allocate: Allocate) -> Bytes:
    """Lay out the pieces; return a buffer for them."""
    offsets, end = lay_out(pieces["size"].tolist())
    buffer = allocate(end)
    assert len(buffer) >= end and buffer.flags.c_contiguous  # C code writes there
    pieces["offset"] = offsets
    return buffer


def _run_step(step: Callable[[Sequence[int]], int], pieces: Array) -> None:
    """Run `step` on the pieces that are pending, and again on those that fail temporarily, all together.

    step: gets their numbers, and returns how many failed.
    """
    faults = pieces["fault"]
    items: list[int] = np.flatnonzero(faults == _PENDING).tolist()
    for delay in LOCAL_DELAYS:
        if not items:
            return
        if delay:  # a sleep of 0 s would release the interpreter
            time.sleep(delay)
        faults[items] = _PENDING
        items = [i for i in items if faults[i] > 0 and faults[i] not in PERMANENT] if step(items) else []


def _payload(buffer: Bytes, pieces: Array, path: Callable[[int], str], ends: str) -> Payload:
    """Return what was read. Raises a fault of the environment that lasts: it is none of the sample's.

    path: returns that of a piece. ends: begins the error of a piece that is shorter than it should be.
    """
    sizes = pieces["size"].tolist()
    errors: list[str | None] = [None] * len(sizes)
    for i, fault in enumerate(pieces["fault"].tolist()):
        if fault > 0:
            error = OSError(fault, os.strerror(fault))
            if is_system_fault(error):
                raise system_fault(error, path(i))
            errors[i] = _reason(error)
        elif fault:
            errors[i] = _TEXTS.get(fault, f"{ends} after {pieces['done'][i]} of {sizes[i]} bytes")
        if fault:
            sizes[i] = 0
    return Payload(buffer=buffer, offsets=pieces["offset"].tolist(), sizes=sizes, errors=errors)


# --- directories ------------------------------------------------------------------------------------------------------


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
    start.

    Examples:
        >>> os.mkdir("photos")
        >>> missing_path("photoz/cat")
        "; did you mean 'photos/cat'?"
    """
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


def missing_file(path: str) -> str:
    """Return a local path that does not exist, and a hint; empty if it exists."""
    return "" if os.path.exists(os.path.expanduser(path)) else f"{path!r}{missing_path(path)}"
