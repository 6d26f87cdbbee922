"""Where bytes live: a local disk, or any file system that fsspec speaks.

Both offer the same few reads. A short-lived fault (a network file system that hiccups, a server that answers 503) is
tried again up to three times, all faulty files of a call together; what stays unreadable is an error text in the
payload and spoils no other file.

Local reads are the hot path of the whole loader: open, fstat, preadv straight into the caller's buffer, close, and
nothing else for a file.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from stat import S_IFDIR, S_IFMT, S_IFREG
from typing import Any, Protocol, TypeVar, final

import numpy as np

from gpuflow.errors import MissingExtra, SourceError
from gpuflow.sources.base import Allocate, Payload

__all__ = [
    "LocalStorage",
    "ReadAt",
    "RemoteStorage",
    "Shard",
    "Storage",
    "is_remote",
    "open_storage",
    "parent_of",
    "patiently",
]

ReadAt = Callable[[int, int], bytes]
"""read_at(offset, size) gives the bytes there, fewer at the end of the file."""

T = TypeVar("T")

_DELAYS = (0.0, 0.05, 0.1, 0.2)
"""Seconds before each try."""

_TRIED = f"; tried {len(_DELAYS)} times"
_KEPT_OPEN = 32
"""Files that one call holds open at once; a chunk of more opens the others when their turn comes."""

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a named pipe must not wait for its writer
_LASTING = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file",
    errno.EISDIR: "is a directory",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: "too many symbolic links",
    errno.ENAMETOOLONG: "file name too long",
}
_REMOTE_BLOCK_BYTES = 4 << 20
_REMOTE_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file that is read in ranges. `stamp` (mtime, or a server's tag) tells whether it is still the same."""

    path: str
    size: int
    stamp: str


class Storage(Protocol):
    """A file system, as far as sources need one."""

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        """Whole files. Never raises for a file that cannot be read."""

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        """`sizes[i]` bytes of `shards[i]` from `starts[i]` on. Never raises for a range that cannot be read."""

    def load(self, path: str) -> bytes:
        """One whole file. Raises SourceError."""

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        """Size and stamp of each file, or why it cannot be read."""

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        """`scanner` over each shard, given a way to read it front to back."""

    def close(self) -> None:
        """Closes what is open."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as s3://bucket/key."""
    return "://" in path


def parent_of(path: str) -> str:
    """The directory of a path or URL, with its last slash; nothing for a bare name."""
    return path[: path.rfind("/") + 1]


def open_storage(path: str) -> Storage:
    """The file system that a path or URL lives on."""
    return RemoteStorage(path) if is_remote(path) else LocalStorage()


def patiently(action: Callable[[], T], lasting: tuple[type[Exception], ...]) -> T:
    """Calls `action`, again after a short while when it fails, but at once gives up on the `lasting` exceptions."""
    for delay in _DELAYS[1:]:
        try:
            return action()
        except lasting:
            raise
        except Exception:  # file systems of fsspec raise whatever their library raises
            time.sleep(delay)
    return action()


@final
class LocalStorage:
    """Files of this machine, or of a network file system that is mounted here."""

    def __init__(self) -> None:
        self._pool = _FilePool()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[()]]:
        return LocalStorage, ()  # another process opens its own files

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        count = len(paths)
        descriptors = [-1] * count
        sizes = [0] * count
        errors: list[str | None] = [None] * count

        def close(i: int) -> None:
            if descriptors[i] >= 0:
                os.close(descriptors[i])
                descriptors[i] = -1

        def measure(i: int) -> None:
            if i < _KEPT_OPEN:
                try:
                    descriptors[i] = os.open(paths[i], _READ_ONLY)
                    status = os.fstat(descriptors[i])
                except OSError as fault:
                    if fault.errno not in _OUT_OF_DESCRIPTORS:
                        raise
                    status = os.stat(paths[i])
            else:
                status = os.stat(paths[i])
            if S_IFMT(status.st_mode) != S_IFREG:
                errors[i] = "is a directory" if S_IFMT(status.st_mode) == S_IFDIR else "not a regular file"
            elif not status.st_size:
                errors[i] = "empty file"
            else:
                sizes[i] = status.st_size

        def fetch(i: int) -> None:
            if descriptors[i] < 0:
                descriptors[i] = os.open(paths[i], _READ_ONLY)
            start, size = offsets[i], sizes[i]
            got = os.preadv(descriptors[i], [view[start : start + size]], 0)
            if got < size:
                got += _read_rest(descriptors[i], view[start + got : start + size], got)
                if got < size:
                    errors[i] = f"ends after {got} of {size} bytes"
            close(i)

        try:
            _each(measure, close, errors, range(count))
            offsets = [0, *accumulate(sizes)]
            buffer = allocate(offsets.pop())
            view = buffer.data
            _each(fetch, close, errors, [i for i in range(count) if sizes[i]])
        finally:
            for i in range(count):
                close(i)
        return Payload(buffer=buffer, offsets=offsets, sizes=_readable(sizes, errors), errors=errors)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        errors: list[str | None] = [None if size else "empty file" for size in sizes]
        offsets = [0, *accumulate(sizes)]
        buffer = allocate(offsets.pop())
        view = buffer.data

        def fetch(i: int) -> None:
            try:
                file = self._pool.acquire(shards[i])
            except _Changed as change:
                errors[i] = str(change)
                return
            start, size = offsets[i], sizes[i]
            try:
                got = _read_rest(file.descriptor, view[start : start + size], starts[i])
            except OSError:
                file.broken = True
                raise
            finally:
                self._pool.release(file)
            if got < size:
                errors[i] = f"its shard ends after {got} of {size} bytes; it shrank since it was indexed"

        _each(fetch, lambda i: None, errors, [i for i, size in enumerate(sizes) if size])
        return Payload(buffer=buffer, offsets=offsets, sizes=_readable(sizes, errors), errors=errors)

    def load(self, path: str) -> bytes:
        def action() -> bytes:
            with open(path, "rb", buffering=0) as file:
                return file.read()

        lasting = (FileNotFoundError, IsADirectoryError, PermissionError, NotADirectoryError)
        try:
            return patiently(action, lasting)
        except OSError as fault:
            raise SourceError(f"{path}: {_reason(fault)}; check that it can be read") from fault

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        return [self._inspect(path) for path in paths]

    def _inspect(self, path: str) -> Shard | str:
        try:
            status = os.stat(path)
        except OSError as fault:
            return _reason(fault)
        if S_IFMT(status.st_mode) != S_IFREG:
            return "is a directory" if S_IFMT(status.st_mode) == S_IFDIR else "not a regular file"
        return Shard(path=path, size=status.st_size, stamp=str(status.st_mtime_ns))

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        for shard in shards:
            try:
                descriptor = os.open(shard.path, _READ_ONLY)
            except OSError as fault:
                raise SourceError(f"{shard.path}: {_reason(fault)}; check that it can be read") from fault
            try:
                yield scanner(shard, _reader(descriptor))
            finally:
                os.close(descriptor)

    def close(self) -> None:
        self._pool.close()


@final
class RemoteStorage:
    """Files behind a URL, through fsspec: s3://, gs://, http://, memory:// and others.

    Args:
        url: any address on the file system; the part before its path selects the file system.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as absent:
            raise MissingExtra(f"reading {url}", "fsspec", "remote") from absent
        try:
            self._fs: Any = url_to_fs(url)[0]
        except (ImportError, ValueError) as fault:  # the protocol needs another package, or nobody knows it
            raise SourceError(f"{url} cannot be opened: {fault}; check its scheme and what it needs") from fault

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        return self._read([os.fsdecode(path) for path in paths], [None] * len(paths), [None] * len(paths), allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        return self._read([shard.path for shard in shards], starts, ends, allocate)

    def _read(
        self, urls: list[str], starts: Sequence[int | None], ends: Sequence[int | None], allocate: Allocate
    ) -> Payload:
        found = [b""] * len(urls)
        errors: list[str | None] = [None] * len(urls)
        todo = list(range(len(urls)))
        for delay in _DELAYS:
            time.sleep(delay)
            again = []
            for i, answer in zip(todo, self._ask(todo, urls, starts, ends), strict=True):
                if isinstance(answer, FileNotFoundError):
                    errors[i] = "no such file"
                elif isinstance(answer, Exception):
                    errors[i] = _describe(answer) + _TRIED
                    again.append(i)
                else:
                    found[i], errors[i] = _checked(bytes(answer), starts[i], ends[i])
            if not again:
                break
            todo = again
        sizes = [len(data) for data in found]
        offsets = [0, *accumulate(sizes)]
        buffer = allocate(offsets.pop())
        for offset, size, data in zip(offsets, sizes, found, strict=True):
            buffer[offset : offset + size] = np.frombuffer(data, dtype=np.uint8)
        return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)

    def _ask(
        self, todo: list[int], urls: list[str], starts: Sequence[int | None], ends: Sequence[int | None]
    ) -> list[Any]:
        """One answer each, bytes or an exception; what the file system asks for at once, it fetches concurrently."""
        try:
            answers: list[Any] = self._fs.cat_ranges(
                [urls[i] for i in todo], [starts[i] for i in todo], [ends[i] for i in todo], on_error="return"
            )
        except Exception as fault:  # file systems of fsspec raise whatever their library raises
            return [fault] * len(todo)
        return answers

    def load(self, path: str) -> bytes:
        try:
            return bytes(patiently(lambda: self._fs.cat_file(path), (FileNotFoundError,)))
        except FileNotFoundError as fault:
            raise SourceError(f"{path}: no such file; check the address") from fault
        except Exception as fault:  # as above
            raise SourceError(f"{path}: {_describe(fault)}{_TRIED}; check that it can be read") from fault

    def find(self, root: str) -> list[str]:
        """All files below `root`, relative to it, in no particular order."""
        try:
            found = patiently(lambda: self._fs.find(root), (FileNotFoundError,))
        except FileNotFoundError:
            return []
        except Exception as fault:  # as above
            raise SourceError(f"{root}: {_describe(fault)}{_TRIED}; check that it can be listed") from fault
        start = len(self._fs._strip_protocol(root).rstrip("/")) + 1
        return [name[start:] for name in found]

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        with ThreadPoolExecutor(_REMOTE_THREADS) as threads:
            return list(threads.map(self._inspect, paths))

    def _inspect(self, path: str) -> Shard | str:
        try:
            info = patiently(lambda: self._fs.info(path), ())  # over HTTP any failure comes as FileNotFoundError
        except FileNotFoundError:
            return "no such file"
        except Exception as fault:  # as above
            return _describe(fault) + _TRIED
        if info.get("size") is None:
            return "its server does not tell its size"
        tags = (
            "ETag",
            "etag",
            "Content-MD5",
            "md5Hash",
            "Last-Modified",
            "LastModified",
            "mtime",
            "updated",
            "created",
        )
        stamp = next((str(info[tag]) for tag in tags if info.get(tag)), "")
        return Shard(path=path, size=int(info["size"]), stamp=stamp)

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        def scan_one(shard: Shard) -> T:
            with self._fs.open(shard.path, "rb", block_size=_REMOTE_BLOCK_BYTES, cache_type="readahead") as file:

                def read_at(offset: int, size: int) -> bytes:
                    file.seek(offset)
                    return bytes(file.read(size))

                return scanner(shard, read_at)

        def scan_patiently(shard: Shard) -> T:
            try:
                return patiently(lambda: scan_one(shard), (SourceError, FileNotFoundError))
            except SourceError:
                raise
            except Exception as fault:  # as above
                raise SourceError(f"{shard.path}: {_describe(fault)}; check that it can be read in ranges") from fault

        with ThreadPoolExecutor(_REMOTE_THREADS) as threads:
            yield from threads.map(scan_patiently, shards)

    def close(self) -> None:
        """Nothing is open: fsspec keeps its own connections, shared by the whole process."""


class _Changed(Exception):
    """A shard is no longer the file that was indexed."""


class _OpenFile:
    """A descriptor, how many calls read from it just now, and whether a read from it failed."""

    __slots__ = ("broken", "descriptor", "key", "users")

    def __init__(self, key: Shard, descriptor: int) -> None:
        self.key, self.descriptor, self.users, self.broken = key, descriptor, 0, False


@final
class _FilePool:
    """Open shards, shared by threads: at most `limit` of them idle, the longest unused closed first."""

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[Shard, _OpenFile] = OrderedDict()

    def acquire(self, shard: Shard) -> _OpenFile:
        with self._lock:
            file = self._files.get(shard)
            if file is not None:
                file.users += 1
                self._files.move_to_end(shard)
                return file
        opened = _OpenFile(shard, _open_unchanged(shard))
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
        with self._lock:
            for file in self._files.values():
                if not file.users:
                    os.close(file.descriptor)
            self._files.clear()


def _open_unchanged(shard: Shard) -> int:
    descriptor = os.open(shard.path, _READ_ONLY)
    try:
        status = os.fstat(descriptor)
        if (status.st_size, str(status.st_mtime_ns)) != (shard.size, shard.stamp):
            raise _Changed(f"its shard changed since it was indexed ({shard.size} bytes then, {status.st_size} now)")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _readable(sizes: Sequence[int], errors: Sequence[str | None]) -> list[int]:
    """The sizes, 0 where there is an error."""
    return [size if error is None else 0 for size, error in zip(sizes, errors, strict=True)]


def _reader(descriptor: int) -> ReadAt:
    def read_at(offset: int, size: int) -> bytes:
        return os.pread(descriptor, size, offset)

    return read_at


def _read_rest(descriptor: int, target: memoryview, start: int) -> int:
    """Fills `target` from `start` on and gives the number of bytes that there were."""
    got = 0
    while got < len(target):
        more = os.preadv(descriptor, [target[got:]], start + got)
        if not more:
            break
        got += more
    return got


def _each(
    step: Callable[[int], None], undo: Callable[[int], None], errors: list[str | None], items: Sequence[int]
) -> None:
    """Runs `step` for each item. Faults become texts in `errors`; short-lived ones are tried again, all together."""
    for delay in _DELAYS:
        if delay:
            time.sleep(delay)
        again = []
        for i in items:
            try:
                step(i)
            except OSError as fault:
                undo(i)
                errors[i] = _reason(fault)
                if fault.errno not in _LASTING:
                    again.append(i)
        if not again or delay == _DELAYS[-1]:
            return
        for i in again:
            errors[i] = None
        items = again


def _reason(fault: OSError) -> str:
    if fault.errno in _LASTING:
        return _LASTING[fault.errno]
    return (fault.strerror or str(fault)).lower() + _TRIED


def _describe(fault: Exception) -> str:
    text = str(fault)
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def _checked(data: bytes, start: int | None, end: int | None) -> tuple[bytes, str | None]:
    """The data and None, or nothing and why it is not what was asked for."""
    if not data:
        return b"", "empty file"
    if start is None or end is None or len(data) == end - start:
        return data, None
    if len(data) > end - start:
        return b"", f"its server sent {len(data)} bytes for a range of {end - start}; it must support range requests"
    return b"", f"its shard ends after {len(data)} of {end - start} bytes; it shrank since it was indexed"
