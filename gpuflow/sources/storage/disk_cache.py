"""A bounded folder of downloaded files and blocks on a local disk, which the processes of one machine share.

    gpuflow-cache       which format the folder has
    used                how many bytes the folder holds; locked while files are added or removed
    partial/NAME        what one process downloads: locked by it, and renamed once it is whole and on the disk
    entries/NA/ME       a header, a checksum for each page, and the data

A process that is killed leaves at most files in `partial` behind: their locks end with it, so another process takes
them over or removes them. A machine that loses power may leave an entry that is not whole: its checksums say so.
No link is followed, and a link, a pipe or an empty directory in place of an entry is removed.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import stat
import struct
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

from gpuflow.errors import SourceError
from gpuflow.pipeline.bounds import Bounds
from gpuflow.runtime.files import atomic_write, lock_within

VERSION_BYTES = 16

_FORMAT = "gpuflow cache, format 1\n"
_MARKER = "gpuflow-cache"
_USED = "used"
_PARTIAL = "partial"
_ENTRIES = "entries"
_LOCK_SECONDS = 60.0
"""The longest wait for the cache's lock, which another process holds while it reads the list of files."""
_SPARE = 1 / 20
"""Of the size, freed on top of what is needed, so that not each new entry reads the list of files."""

_HEAD = struct.Struct("<8sQ16sI")
"""Magic number, bytes of data, version of the object, checksum of what precedes it and of the pages' checksums."""
_MAGIC = b"gpuflow\1"
_PAGE_BYTES = 64 << 10
"""Each page has its own checksum: a sample of a block is checked without reading the whole block."""
_FIRST_BYTES = 4096
_DISK_BYTES = 4096
"""File systems allocate in units of this size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """Where files behind URLs are kept on a local disk, and how much of it they may take.

    Args:
        dir: a folder for this alone, on a local disk; the processes of a machine share it.
        size: the most bytes that it holds, as a number or with a unit, such as 200GB.
    """

    dir: str
    size: Annotated[int, Bounds(least=16 << 20, words="at least 16MiB")]


class _Damaged(Exception):
    """An entry is not what was written."""


class _Foreign(Exception):
    """A link, a directory or a pipe stands in place of a file of the cache, or that file has another name elsewhere."""


@final
class Claim:
    """The right to write one entry, held by an open and locked file in `partial`."""

    def __init__(self, name: str, path: Path, descriptor: int) -> None:
        self.name = name
        self.path = path
        self.descriptor = descriptor


@final
class DiskCache:
    """The entries of one folder. For many threads and processes; a name is a hash in hexadecimal digits.

    Where the disk is full or cannot be written, there is one warning, and nothing more is added.

    Args:
        folder: see the module.
        size: the most bytes that it may hold.

    Raises:
        SourceError: the folder holds something else, or the cache of another version, or cannot be used.
    """

    def __init__(self, folder: str, size: int) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self.size = size
        self.opened_ns = time.time_ns()
        self.damaged = 0
        self._guard = threading.Lock()
        self._counting = threading.Lock()
        self.writing = True
        self._used = -1
        self._finalizer: weakref.finalize[..., DiskCache] | None = None
        try:
            self._open(folder)
        except SourceError:
            self.close()
            raise
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.close()
                raise SourceError(
                    f"source.cache.dir must be a folder that can be written, got {folder!r}: "
                    f"{fault.strerror or fault}; name another one"
                ) from fault
            self._stop_writing(fault)

    def _open(self, given: str) -> None:
        self.folder.mkdir(0o755, parents=True, exist_ok=True)
        self._mode = stat.S_IMODE(self.folder.stat().st_mode)
        self._check_rights(self.folder, given)
        self._check_format(given)
        self._used = self._own(_USED, given, os.O_RDWR | os.O_CREAT)
        self._finalizer = weakref.finalize(self, os.close, self._used)
        try:
            with self._locked():
                self._check_format(given)
                if not (self.folder / _MARKER).exists():
                    with atomic_write(self.folder / _MARKER, text=True) as file:
                        file.write(_FORMAT)
                for name in (_PARTIAL, _ENTRIES):
                    self._make_folder(self.folder / name)
                    self._check_rights(self.folder / name, given)
                self._remove_left_over()
        except OSError as fault:
            if fault.errno in (errno.ENOLCK, errno.ENOTSUP):
                raise SourceError(
                    f"source.cache.dir must be on a file system that has file locks, got {given!r}; "
                    "name a folder on a local disk"
                ) from fault
            raise

    def _check_rights(self, folder: Path, given: str) -> None:
        """Raise SourceError for a folder that everyone may write to; warn of one that a group may write to."""
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH:
            raise SourceError(
                f"source.cache.dir must be a folder that not everyone may write to, got {given!r}, where any user can "
                f"replace the images; chmod -R o-w {str(self.folder)!r}, or name another one"
            )
        if mode & stat.S_IWGRP and folder == self.folder:
            warnings.warn(
                f"source.cache.dir {given!r} can be written by its group, whose members can replace the images; unless "
                f"you trust them, chmod -R g-w {str(self.folder)!r}",
                stacklevel=2,
            )

    def _own(self, name: str, given: str, flags: int) -> int:
        """Open a file right below the folder. Raises SourceError where that is something else."""
        try:
            return self._opened(self.folder / name, flags)
        except _Foreign:
            raise SourceError(
                f"source.cache.dir must hold files of gpuflow alone, got {given!r}, where {name!r} is a link, or no "
                "file; remove it, and find out who made it"
            ) from None

    def _opened(self, path: Path, flags: int = os.O_RDWR) -> int:
        """Open a file of the cache without following a link. Raises _Foreign, and OSError as `os.open` does."""
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, self._mode & 0o666)
        except OSError as fault:
            if fault.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _Foreign from fault
            raise
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (flags & os.O_RDWR and status.st_nlink > 1):
            os.close(descriptor)
            raise _Foreign
        return descriptor

    def _make_folder(self, path: Path) -> None:
        """Make a folder, unless it is there. Raises NotADirectoryError where something else is, such as a link."""
        with suppress(FileExistsError):
            path.mkdir(self._mode)
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{str(path)!r} must be a folder, and no link")

    def _check_format(self, given: str) -> None:
        """Raise SourceError for a folder with anything but a cache of this format; nothing in it is touched."""
        try:
            with open(self._own(_MARKER, given, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
                found = file.read(1000)
        except FileNotFoundError:
            known = {_MARKER, _USED, _PARTIAL, _ENTRIES}
            others = [name for name in os.listdir(self.folder) if name not in known and _MARKER not in name]
            if others:
                raise SourceError(
                    f"source.cache.dir must be an empty folder or one that gpuflow made, got {given!r} with "
                    f"{min(others)!r} in it; name a folder for the cache alone"
                ) from None
            return
        if found != _FORMAT:
            raise SourceError(
                f"source.cache.dir must have the format of this version of gpuflow, {_FORMAT.strip()!r}, got {given!r} "
                f"with {found.strip()[:60]!r}; name another folder, or delete this one once no other version uses it"
            )

    def close(self) -> None:
        """Close the folder. Threads that still read add nothing more."""
        self.writing = False
        with self._guard:
            self._used = -1
            if self._finalizer is not None:
                self._finalizer()

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, name: str, version: bytes | None, start: int = 0, size: int | None = None) -> bytes | None:
        """Read `size` bytes from `start` on of an entry, by default all; None where there is none of this version.

        version: of the object at its server; None takes any that was confirmed since this cache was opened. Damaged
        entries are counted, and are like none.
        """
        path = self._entry(name)
        try:
            descriptor = self._opened(path, os.O_RDONLY)
        except OSError:
            return None
        except _Foreign:
            with self._counting:
                self.damaged += 1
            _remove_foreign(path)
            return None
        try:
            status = os.fstat(descriptor)
            if version is None and not self.opened_ns <= status.st_mtime_ns <= time.time_ns():
                return None  # nor is a time in the future believed
            data = _read(descriptor, status.st_size, version, start, size)
            if data is not None:
                with suppress(OSError):  # of another user
                    os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
            return data
        except (OSError, _Damaged):
            with self._counting:
                self.damaged += 1
            self._discard(descriptor, path)
            return None
        finally:
            os.close(descriptor)

    def _discard(self, descriptor: int, path: Path) -> None:
        """Remove a damaged entry, unless another one has taken its place."""
        with suppress(OSError), self._locked():
            if _is_at(descriptor, path):
                path.unlink()
                self._add(-_on_disk(os.fstat(descriptor).st_size))

    def confirm(self, name: str, when_ns: int) -> None:
        """Note that the server had the version of an entry at this time."""
        with suppress(OSError):
            os.utime(self._entry(name), ns=(time.time_ns(), when_ns), follow_symlinks=False)

    # --- writing ----------------------------------------------------------------------------------------------------

    def claim(self, name: str) -> Claim | None:
        """Acquire the right to write an entry; None while another thread or process has it. `release` it afterwards."""
        path = self.folder / _PARTIAL / name
        try:
            while self.writing:
                try:
                    descriptor = self._opened(path, os.O_RDWR | os.O_CREAT)
                except _Foreign:
                    if not _remove_foreign(path):
                        raise OSError(errno.EISDIR, f"{str(path)!r} is in the way") from None
                    continue
                try:
                    if not lock_within(descriptor, 0):
                        os.close(descriptor)
                        return None
                    if _is_at(descriptor, path):
                        return Claim(name, path, descriptor)
                except OSError:
                    os.close(descriptor)
                    raise
                _unlock(descriptor)  # its former holder has renamed or removed the file
        except OSError as fault:
            self._stop_writing(fault)
        return None

    def store(self, claim: Claim, data: bytes, version: bytes, confirmed_ns: int) -> None:
        """Write the entry of a claim. Removes entries that were not used for the longest time if there is no room.

        confirmed_ns: when the server was asked for the version; 0 if it came from a list of files.
        """
        head = _head(data, version)
        size = len(head) + len(data)
        try:
            with self._locked():
                before = _on_disk(os.fstat(claim.descriptor).st_size)
                if not self._make_room(_on_disk(size) - before):
                    return
                self._add(_on_disk(size) - before)
                os.ftruncate(claim.descriptor, size)
            for part, at in ((head, 0), (data, len(head))):
                _write(claim.descriptor, part, at)
            os.fsync(claim.descriptor)
            os.utime(claim.descriptor, ns=(time.time_ns(), confirmed_ns))
            path = self._entry(claim.name)
            self._make_folder(path.parent)
            with self._locked():
                old = _size_of(path)
                claim.path.replace(path)
                self._add(-_on_disk(old))
        except OSError as fault:
            self._stop_writing(fault)

    def release(self, claim: Claim) -> None:
        """Give up a claim. What was not stored is removed."""
        try:
            if _is_at(claim.descriptor, claim.path):
                size = os.fstat(claim.descriptor).st_size
                claim.path.unlink()
                if size:
                    with self._locked():
                        self._add(-_on_disk(size))
        except OSError as fault:
            self._stop_writing(fault)
        finally:
            _unlock(claim.descriptor)

    def _stop_writing(self, fault: OSError) -> None:
        """Warn at the first fault, and add nothing from then on."""
        with self._counting:
            first = self.writing
            self.writing = False
        if first:
            is_full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
            action = "free disk space, or lower source.cache.size" if is_full else "repair it, or name another one"
            warnings.warn(
                f"source.cache.dir {str(self.folder)!r}: {fault.strerror or fault}; nothing more is added to it, and "
                f"what it lacks is read from the server; {action}",
                stacklevel=2,
            )

    # --- the number of bytes, while the folder is locked ------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder, so that no other process adds or removes files. Raises TimeoutError after a minute."""
        if not self._guard.acquire(timeout=_LOCK_SECONDS):
            raise TimeoutError(errno.ETIMEDOUT, "another thread holds the cache's lock")
        try:
            if self._used < 0:
                raise OSError(errno.EBADF, "the cache is closed")
            if not lock_within(self._used, _LOCK_SECONDS):
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the cache's lock")
            try:
                yield
            finally:
                fcntl.flock(self._used, fcntl.LOCK_UN)
        finally:
            self._guard.release()

    def _bytes_used(self) -> int:
        """Return what `used` says; of a machine that was started since then, or if it says nothing, what the files
        have."""
        text = os.pread(self._used, 100, 0).decode(errors="replace").split()
        if len(text) == 2 and text[1] == _boot() and text[0].isdecimal():
            return int(text[0])
        return self._count(sum(_on_disk(size) for *_, size in self._files()))

    def _count(self, used: int) -> int:
        os.pwrite(self._used, f"{used:020d} {_boot()}\n".encode(), 0)
        return used

    def _add(self, size: int) -> None:
        self._count(max(0, self._bytes_used() + size))

    def _make_room(self, size: int) -> bool:
        """Remove old entries if there is no room for `size` bytes. Return True if there is room then."""
        if size > self.size or self._bytes_used() + size <= self.size:
            return size <= self.size
        self._remove_left_over()
        files = sorted(self._files())
        used = sum(_on_disk(held) for *_, held in files)
        limit = self.size - size - int(self.size * _SPARE)
        for _, path, held in files:
            if used <= limit:
                break
            if path.startswith(str(self.folder / _ENTRIES)):
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= _on_disk(held)
        return self._count(used) + size <= self.size

    def _files(self) -> Iterator[tuple[int, str, int]]:
        """Yield all entries and downloads: when each was used, its path and its size."""
        now = time.time_ns()
        with os.scandir(self.folder / _ENTRIES) as found:
            folders = [folder.path for folder in found if folder.is_dir(follow_symlinks=False)]
        for folder in (str(self.folder / _PARTIAL), *folders):
            with os.scandir(folder) as files:
                for file in files:
                    with suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            used_ns = status.st_atime_ns if status.st_atime_ns <= now else 0
                            yield used_ns, file.path, status.st_size

    def _remove_left_over(self) -> None:
        """Remove the downloads of processes that have ended."""
        for path in (self.folder / _PARTIAL).iterdir():
            with suppress(FileNotFoundError):
                try:
                    descriptor = self._opened(path)
                except _Foreign:
                    _remove_foreign(path)
                    continue
                try:
                    if lock_within(descriptor, 0) and _is_at(descriptor, path):
                        size = os.fstat(descriptor).st_size
                        path.unlink()
                        self._add(-_on_disk(size))
                finally:
                    _unlock(descriptor)

    def _entry(self, name: str) -> Path:
        return self.folder / _ENTRIES / name[:2] / name[2:]


def _read(descriptor: int, file_size: int, version: bytes | None, start: int, size: int | None) -> bytes | None:
    """Read a part of an open entry; None if it is of another version. Raises _Damaged."""
    head = os.pread(descriptor, _FIRST_BYTES, 0)
    if len(head) < _HEAD.size:
        raise _Damaged
    magic, length, its_version, checksum = _HEAD.unpack_from(head)
    pages = -(-length // _PAGE_BYTES)
    first = _HEAD.size + 4 * pages
    if magic != _MAGIC or file_size != first + length:
        raise _Damaged
    if len(head) < first:
        head += os.pread(descriptor, first - len(head), len(head))
    table = head[_HEAD.size : first]
    if zlib.crc32(table, zlib.crc32(head[: _HEAD.size - 4])) != checksum:
        raise _Damaged
    if version is not None and its_version != version:
        return None
    end = length if size is None else min(length, start + size)
    from_page = start // _PAGE_BYTES
    to_page = -(-end // _PAGE_BYTES)
    at = from_page * _PAGE_BYTES
    wanted = min(length, to_page * _PAGE_BYTES) - at
    data = os.pread(descriptor, wanted, first + at)
    if len(data) < wanted:
        raise _Damaged
    view = memoryview(data)
    for i, expected in enumerate(struct.unpack_from(f"<{to_page - from_page}I", table, 4 * from_page)):
        if zlib.crc32(view[i * _PAGE_BYTES : (i + 1) * _PAGE_BYTES]) != expected:
            raise _Damaged
    return data[start - at : end - at]


def _head(data: bytes, version: bytes) -> bytes:
    """Return the header and the checksums that precede an entry's data."""
    view = memoryview(data)
    sums = [zlib.crc32(view[at : at + _PAGE_BYTES]) for at in range(0, len(data), _PAGE_BYTES)]
    table = struct.pack(f"<{len(sums)}I", *sums)
    start = _HEAD.pack(_MAGIC, len(data), version, 0)[:-4]
    return start + struct.pack("<I", zlib.crc32(table, zlib.crc32(start))) + table


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view = view[count:]
        at = at + count


def _remove_foreign(path: Path) -> bool:
    """Remove what stands in place of a file, but no folder that holds something. Returns whether it is gone."""
    for remove in (os.unlink, os.rmdir):
        with suppress(OSError):
            remove(path)
    return not os.path.lexists(path)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is still the one of this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _unlock(descriptor: int) -> None:
    """Close a locked file. A child that was forked meanwhile has it open, too, and would keep the lock."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _on_disk(size: int) -> int:
    """Return how many bytes of a disk a file of this size takes."""
    return -(-size // _DISK_BYTES) * _DISK_BYTES


@functools.cache
def _boot() -> str:
    """Return a text that differs after each start of the machine, which may have lost what was not yet on the disk."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox without it
        return "unknown"
