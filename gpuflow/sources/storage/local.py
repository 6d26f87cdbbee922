"""Reads files of this machine's file systems, with as few system calls as possible.

This is the loader's hot path. A file costs open, fstat, preadv straight into the caller's buffer, and close.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from stat import S_IFDIR, S_IFMT, S_IFREG
from typing import TypeVar, final

from gpuflow.errors import SourceError, is_system_fault, system_fault
from gpuflow.sources.payload import Allocate, Payload, lay_out
from gpuflow.sources.storage.base import ReadAt, Shard
from gpuflow.sources.storage.retry import LOCAL_DELAYS, after_retries, retry, retry_each

__all__ = ["PERMANENT", "LocalStorage"]

T = TypeVar("T")

_OPENED_IN_ADVANCE = 32
"""Number of files that one call opens in advance; a larger chunk opens each further file when it reads it."""

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

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
        """Where a path is, also after the process has changed to another directory."""
        return os.path.join(os.fsdecode(self._base), path)

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        base = self._base
        places = [path if path[:1] == b"/" else base + path for path in paths]
        count = len(paths)
        descriptors = [-1] * count
        sizes = [0] * count
        errors: list[str | None] = [None] * count

        def close(i: int) -> None:
            if descriptors[i] >= 0:
                os.close(descriptors[i])
                descriptors[i] = -1

        def measure(i: int) -> None:
            if i < _OPENED_IN_ADVANCE:
                try:
                    descriptors[i] = os.open(places[i], _READ_ONLY)
                    status = os.fstat(descriptors[i])
                except OSError as fault:
                    if fault.errno not in _OUT_OF_DESCRIPTORS:
                        raise
                    status = os.stat(places[i])
            else:
                status = os.stat(places[i])
            if S_IFMT(status.st_mode) != S_IFREG:
                errors[i] = "is a directory" if S_IFMT(status.st_mode) == S_IFDIR else "not a regular file"
            elif not status.st_size:
                errors[i] = "empty file"
            else:
                sizes[i] = status.st_size

        def fetch(i: int) -> None:
            if descriptors[i] < 0:
                descriptors[i] = os.open(places[i], _READ_ONLY)
            start, size = offsets[i], sizes[i]
            got = os.preadv(descriptors[i], [view[start : start + size]], 0)
            if got < size:
                got += _read_rest(descriptors[i], view[start + got : start + size], got)
                if got < size:
                    errors[i] = f"ends after {got} of {size} bytes"
            close(i)

        try:
            _each(measure, close, errors, range(count), paths)
            offsets, end = lay_out(sizes)
            buffer = allocate(end)
            view = buffer.data
            _each(fetch, close, errors, [i for i in range(count) if sizes[i]], paths)
        finally:
            for i in range(count):
                close(i)
        return Payload(buffer=buffer, offsets=offsets, sizes=_readable(sizes, errors), errors=errors)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        errors: list[str | None] = [None if size else "empty file" for size in sizes]
        offsets, end = lay_out(sizes)
        buffer = allocate(end)
        view = buffer.data

        def fetch(i: int) -> None:
            file = self._pool.acquire(shards[i])
            start, size = offsets[i], sizes[i]
            try:
                got = _read_rest(file.descriptor, view[start : start + size], starts[i])
                _check_unchanged(shards[i], file.descriptor)  # after the read: what was read before a change is right
            except (OSError, SourceError):
                file.broken = True
                raise
            finally:
                self._pool.release(file)
            if got < size:
                errors[i] = f"its shard ends after {got} of {size} bytes"

        paths = [os.fsencode(shard.path) for shard in shards]
        _each(fetch, lambda i: None, errors, [i for i, size in enumerate(sizes) if size], paths)
        return Payload(buffer=buffer, offsets=offsets, sizes=_readable(sizes, errors), errors=errors)

    def load(self, path: str) -> bytes:
        def action() -> bytes:
            with open(path, "rb", buffering=0) as file:
                return file.read()

        try:
            return retry(action, _is_permanent, LOCAL_DELAYS)
        except OSError as fault:
            raise SourceError(f"{path}: {_reason(fault)}; check that it can be read") from fault

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        return [self._inspect(path) for path in paths]

    def _inspect(self, path: str) -> Shard | str:
        try:
            status = retry(lambda: os.stat(self.place(path)), _is_permanent, LOCAL_DELAYS)
        except OSError as fault:
            return _reason(fault)
        if S_IFMT(status.st_mode) != S_IFREG:
            return "is a directory" if S_IFMT(status.st_mode) == S_IFDIR else "not a regular file"
        stamp, made = str(status.st_mtime_ns), str(status.st_ctime_ns)
        return Shard(path=path, size=status.st_size, stamp=stamp, made=made)

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        def scan_one(shard: Shard) -> T:
            descriptor = os.open(shard.path, _READ_ONLY)
            try:
                try:
                    return scanner(shard, _reader(descriptor))
                finally:
                    _check_unchanged(shard, descriptor)  # which explains what else may be wrong with it
            finally:
                os.close(descriptor)

        for shard in shards:
            try:
                found = retry(partial(scan_one, shard), _is_permanent, LOCAL_DELAYS)
            except OSError as fault:
                raise SourceError(f"{shard.path}: {_reason(fault)}; check that it can be read") from fault
            yield found

    def close(self) -> None:
        self._pool.close()


class _OpenFile:
    """A file descriptor, the number of calls that are reading from it, and whether a read from it failed."""

    __slots__ = ("broken", "descriptor", "key", "users")

    def __init__(self, key: Shard, descriptor: int) -> None:
        self.key, self.descriptor, self.users, self.broken = key, descriptor, 0, False


@final
class _FilePool:
    """Open shards, shared by threads. It keeps at most `limit` idle ones and closes the least recently used first.

    base: the directory that relative paths start from, with a slash at its end.
    """

    def __init__(self, base: bytes, limit: int = 32) -> None:
        self._base, self._limit = base, limit
        self._lock = threading.Lock()
        self._files: OrderedDict[Shard, _OpenFile] = OrderedDict()

    def acquire(self, shard: Shard) -> _OpenFile:
        with self._lock:
            file = self._files.get(shard)
            if file is not None:
                file.users += 1
                self._files.move_to_end(shard)
                return file
        opened = _OpenFile(shard, os.open(os.path.join(self._base, os.fsencode(shard.path)), _READ_ONLY))
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


def _check_unchanged(shard: Shard, descriptor: int) -> None:
    """Raise SourceError if an open shard was written to, in place, since it was indexed, or is another file."""
    status = os.fstat(descriptor)
    if (status.st_size, str(status.st_mtime_ns)) != (shard.size, shard.stamp):
        raise shard.changed(status.st_size)


def _readable(sizes: Sequence[int], errors: Sequence[str | None]) -> list[int]:
    """The sizes, with 0 for files that have an error."""
    return [size if error is None else 0 for size, error in zip(sizes, errors, strict=True)]


def _reader(descriptor: int) -> ReadAt:
    def read_at(offset: int, size: int) -> bytes:
        return os.pread(descriptor, size, offset)

    return read_at


def _read_rest(descriptor: int, target: memoryview, start: int) -> int:
    """Fill `target` from offset `start` of the file; return the number of bytes read."""
    got = 0
    while got < len(target):
        more = os.preadv(descriptor, [target[got:]], start + got)
        if not more:
            break
        got += more
    return got


def _is_permanent(fault: Exception) -> bool:
    """Whether another attempt would fail, too: the file is not there or must not be read, or no read has failed."""
    return not isinstance(fault, OSError) or fault.errno in PERMANENT


def _reason(fault: OSError) -> str:
    if fault.errno in PERMANENT:
        return PERMANENT[fault.errno]
    return (fault.strerror or str(fault)).lower() + after_retries(LOCAL_DELAYS)


def _each(
    step: Callable[[int], None],
    undo: Callable[[int], None],
    errors: list[str | None],
    items: Sequence[int],
    paths: Sequence[bytes],
) -> None:
    """Run `step` for each item. Failures become texts in `errors`; temporary ones are retried, all together.

    A fault of the environment that lasts is raised: it is none of the item's.
    """
    refused: dict[int, OSError] = {}

    def attempt(items: Sequence[int]) -> Sequence[int]:
        again = []
        refused.clear()
        for i in items:
            errors[i] = None
            try:
                step(i)
            except OSError as fault:
                undo(i)
                errors[i] = _reason(fault)
                if not _is_permanent(fault):
                    again.append(i)
                if is_system_fault(fault):
                    refused[i] = fault
        return again

    retry_each(items, attempt, LOCAL_DELAYS)
    for i, fault in refused.items():
        raise system_fault(fault, os.fsdecode(paths[i]))
