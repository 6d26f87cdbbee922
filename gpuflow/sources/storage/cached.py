"""Reads files behind URLs through a cache on a local disk: what is not in it is downloaded once for all processes.

Files are kept whole, shards in blocks of 1 MiB. Samples of a shard are read in random order, so a block that is
downloaded for one of them serves its neighbours; whole shards would have to be there before their first sample, and the
samples alone would be as many requests as without a cache.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import redacted
from gpuflow.runtime.threads import DaemonPool
from gpuflow.sources.storage.base import Allocate, Payload, ReadAt, Shard
from gpuflow.sources.storage.disk_cache import VERSION_BYTES, CacheSpec, Claim, DiskCache
from gpuflow.sources.storage.http import Fetched, data_of
from gpuflow.sources.storage.remote import TOO_SHORT, FoundFile, RemoteStorage, read_in_blocks

T = TypeVar("T")

BLOCK_BYTES = 1 << 20

_AT_ONCE = 16
"""Files or blocks that one thread downloads at a time: its memory, and what others may wait for."""
_AHEAD = 4
"""Blocks that are downloaded together where a shard is read from its start to its end."""
_THREADS = 8
_WAIT_SECONDS, _POLL_SECONDS = 60.0, 0.005
"""How long another process may take for what this one needs, too; it then downloads that itself."""

_wants_new: ContextVar[bool] = ContextVar("_wants_new", default=False)


@contextmanager
def new_copies() -> Iterator[None]:
    """Download what is read on this thread while the block runs, though it is kept: it may be what cannot be decoded.

    Each entry is downloaded once more in a process, and is then read from the cache again.
    """
    token = _wants_new.set(True)
    try:
        yield
    finally:
        _wants_new.reset(token)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A whole file, or a block of a shard.

    name: that of the entry in the cache. start, end: of a block. version: of the object; None if it is not known.
    asked_ns: when the server was asked for the version of this file alone; 0 if it was not.
    """

    name: str
    url: str
    start: int | None = None
    end: int | None = None
    version: bytes | None = None
    asked_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of an entry: `size` bytes from `start` on; all where size is None."""

    entry: _Entry
    start: int = 0
    size: int | None = None

    def of(self, answer: _Answer) -> _Answer:
        """Cut the piece out of its entry."""
        if self.size is None or isinstance(answer, str):
            return answer
        return answer[self.start : self.start + self.size]


_Answer = bytes | str
"""The bytes, or why they cannot be read."""


@final
class CachedStorage:
    """A remote storage whose files are kept on a local disk.

    Args:
        storage: the remote one.
        spec: where files are kept.

    Raises:
        SourceError: the folder of the cache cannot be used.
    """

    remote = True

    def __init__(self, storage: RemoteStorage, spec: CacheSpec) -> None:
        self._storage = storage
        self._cache = DiskCache(spec.dir, spec.size)
        self._listed = _Listed()
        self._has_versions = True
        self._counting = threading.Lock()
        self._renewed: set[str] = set()
        self._hits = self._misses = self._hit_bytes = self._downloaded_bytes = 0

    def counts(self) -> dict[str, int]:
        """Return what this process had from the cache (hits) and from the server (misses) since the source was opened.

        hits: reads of a file or block; misses: files and blocks that were downloaded. damaged: entries whose checksum
        was wrong, which are misses, too.
        """
        with self._counting:
            return {
                "hits": self._hits,
                "misses": self._misses,
                "damaged": self._cache.damaged,
                "hit_bytes": self._hit_bytes,
                "downloaded_bytes": self._downloaded_bytes,
            }

    # --- what sources read ------------------------------------------------------------------------------------------

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        urls = list(map(os.fsdecode, paths))
        digests = list(map(_digest, urls))
        listed = self._listed.find(digests)
        entries = [
            _Entry(digest.hex(), url, version=version)
            for digest, url, version in zip(digests, urls, listed, strict=True)
        ]
        known, found = self._with_versions(entries)
        answers = dict(zip(known, self._answers([_Piece(entry) for entry in known.values()]), strict=True)) | found
        rest = [i for i in range(len(urls)) if i not in answers]
        if rest:
            answers |= dict(zip(rest, map(data_of, self._get([entries[i] for i in rest])), strict=True))
        return Payload.of([answers[i] for i in range(len(urls))], allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        if not self._are_versioned(shards):
            return self._storage.read_ranges(shards, starts, sizes, allocate)
        pieces = [_pieces(*sample) for sample in zip(shards, starts, sizes, strict=True)]
        answers = iter(self._answers([piece for sample in pieces for piece in sample]))
        samples = [_joined([next(answers) for _ in sample], size) for sample, size in zip(pieces, sizes, strict=True)]
        self._storage.check_unchanged(shards, samples)
        return Payload.of(samples, allocate)

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        if not self._are_versioned(shards):
            yield from self._storage.scan(shards, scanner)
            return
        with DaemonPool(_THREADS, "storage") as threads:
            yield from threads.map(lambda shard: scanner(shard, self._reader(shard)), shards)

    def _reader(self, shard: Shard) -> ReadAt:
        """Return a function that reads a shard from its start to its end, some blocks at a time."""

        def read(start: int, size: int) -> _Answer:
            answer = _joined(self._answers(_pieces(shard, start, size)), size)
            self._storage.check_unchanged([shard], [answer])
            return answer

        return read_in_blocks(shard, read, BLOCK_BYTES, _AHEAD * BLOCK_BYTES)

    def find(self, root: str) -> list[FoundFile]:
        """See `RemoteStorage.find`. The server need not be asked for versions that its listing has, with sizes."""
        found = self._storage.find(root)
        listed = [file for file in found if file.stamp and file.size]
        digests = [_digest(f"{root}/{file.path}") for file in listed]
        versions = [_version(file.size, file.stamp) for file in listed]
        self._listed = _Listed(digests, versions)
        return found

    def load(self, path: str) -> bytes:
        return self._storage.load(path)

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        return self._storage.inspect(paths)

    def close(self) -> None:
        self._cache.close()
        self._storage.close()

    # --- versions ---------------------------------------------------------------------------------------------------

    def _with_versions(self, entries: Sequence[_Entry]) -> tuple[dict[int, _Entry], dict[int, _Answer]]:
        """Return the entries whose version is known, by their numbers, and the files for which none is needed.

        A version that no listing had is asked for, unless a process of this machine has asked since this cache was
        opened. Files in neither result are not for the cache, because the server does not say.
        """
        known = {i: entry for i, entry in enumerate(entries) if entry.version is not None}
        found: dict[int, _Answer] = {}
        if not self._has_versions or len(known) == len(entries):
            return known, found
        ask = []
        for i, entry in enumerate(entries):
            if entry.version is None:
                data = self._cached(_Piece(entry))
                if data is None:
                    ask.append(i)
                else:
                    found[i] = data
        if not self._cache.writing:
            return known, found
        now = time.time_ns()
        for i, info in zip(ask, self._storage.ask([entries[i].url for i in ask]), strict=True):
            if info is not None and self._are_versioned([info]):
                version = _version(info.size, info.stamp)
                known[i] = replace(entries[i], version=version, asked_ns=now)
        return known, found

    def _are_versioned(self, files: Sequence[Shard]) -> bool:
        """Return True if the server says when each of these was changed. Without that an old copy would pass for the
        new."""
        without = next((file.path for file in files if not file.stamp), None)
        if without is None:
            return True
        with self._counting:
            first = self._has_versions
            self._has_versions = False
        if first:
            warnings.warn(
                f"{redacted(without)}: its server gives no ETag and no time of change, so source.cache does not keep "
                "it; remove source.cache, or use a server that does",
                stacklevel=2,
            )
        return False

    # --- entries ----------------------------------------------------------------------------------------------------

    def _answers(self, pieces: Sequence[_Piece]) -> list[_Answer]:
        """Get each piece from the cache, or from the server."""
        answers: dict[_Piece, _Answer] = {}
        missing: dict[_Entry, list[_Piece]] = {}
        for piece in dict.fromkeys(pieces):
            data = self._cached(piece)
            if data is None:
                missing.setdefault(piece.entry, []).append(piece)
            else:
                answers[piece] = data
        deadline = time.monotonic() + _WAIT_SECONDS
        waiting = list(missing)
        while waiting:
            alone = time.monotonic() > deadline
            busy = []
            for first in range(0, len(waiting), _AT_ONCE):
                for entry, answer in self._download(waiting[first : first + _AT_ONCE], alone=alone):
                    if answer is None:
                        busy.append(entry)
                    else:
                        answers |= {piece: piece.of(answer) for piece in missing[entry]}
            if len(busy) == len(waiting):
                self._storage.sleep(_POLL_SECONDS)
            waiting = busy
        return [answers[piece] for piece in pieces]

    def _download(self, entries: Sequence[_Entry], *, alone: bool) -> Iterator[tuple[_Entry, _Answer | None]]:
        """Yield what is in each entry; None for one that another thread or process downloads at this time.

        What is not of the entry's version by the very answer, or by one that comes after it, is not stored: the object
        was changed meanwhile, a proxy sent an older one or an error page, or the file was cut short.

        alone: download each of them, and store none that another one may store.
        """
        mine: dict[_Entry, Claim | None] = {}
        with ExitStack() as stack:
            for entry in entries:
                claim = None if alone else self._cache.claim(entry.name)
                if claim is None:
                    if not alone and self._cache.writing:
                        yield entry, None
                        continue
                else:
                    stack.callback(self._cache.release, claim)
                    data = self._cached(_Piece(entry))
                    if data is not None:  # it was stored just now
                        yield entry, data
                        continue
                mine[entry] = claim
            answers = self._get(list(mine))
            for (entry, claim), answer, version in zip(
                mine.items(), answers, self._versions(mine, answers), strict=True
            ):
                if (
                    claim is not None
                    and isinstance(answer, Fetched)
                    and version is not None
                    and version == entry.version
                ):
                    self._cache.store(claim, answer.data, version, entry.asked_ns)
                    if _wants_new.get():
                        self._renewed.add(entry.name)
                yield entry, data_of(answer)

    def _versions(self, entries: Iterable[_Entry], answers: Sequence[Fetched | str]) -> list[bytes | None]:
        """Return which version each answer is of. A server whose answers do not say it is asked again."""
        said = [answer.now if isinstance(answer, Fetched) else None for answer in answers]
        silent = [i for i, answer in enumerate(answers) if isinstance(answer, Fetched) and said[i] is None]
        urls = [entry.url for entry in entries]
        for i, now in zip(silent, self._storage.ask([urls[i] for i in silent]) if silent else (), strict=True):
            said[i] = now
        return [None if now is None else _version(now.size, now.stamp) for now in said]

    def _cached(self, piece: _Piece) -> bytes | None:
        entry = piece.entry
        if _wants_new.get() and entry.name not in self._renewed:
            return None
        data = self._cache.read(entry.name, entry.version, piece.start, piece.size)
        if data is not None:
            if entry.asked_ns:
                self._cache.confirm(entry.name, entry.asked_ns)
            with self._counting:
                self._hits += 1
                self._hit_bytes += len(data)
        return data

    def _get(self, entries: Sequence[_Entry]) -> list[Fetched | str]:
        """Get entries from the server."""
        if not entries:
            return []
        urls, starts, ends = zip(*((entry.url, entry.start, entry.end) for entry in entries), strict=True)
        answers = self._storage.get(urls, starts, ends)
        sizes = [len(answer.data) for answer in answers if isinstance(answer, Fetched)]
        with self._counting:
            self._misses += len(sizes)
            self._downloaded_bytes += sum(sizes)
        return answers


@final
class _Listed:
    """The versions of listed files, 24 bytes each, where a mapping would need ten times as much.

    Args:
        digests, versions: of each file; its digest is that of its URL.
    """

    def __init__(self, digests: Sequence[bytes] = (), versions: Sequence[bytes] = ()) -> None:
        keys = _keys(digests)
        order = np.argsort(keys)
        self._keys = keys[order]
        self._versions = np.frombuffer(b"".join(versions), np.uint8).reshape(-1, VERSION_BYTES)[order]

    def find(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the version of each file; None where the listing did not say it."""
        if not len(self._keys):
            return [None] * len(digests)
        keys = _keys(digests)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = self._keys[places] == keys
        return [
            self._versions[place].tobytes() if is_known else None for place, is_known in zip(places, known, strict=True)
        ]


def _keys(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(digest[:8] for digest in digests), np.uint64)


def _pieces(shard: Shard, start: int, size: int) -> list[_Piece]:
    """Return the parts of blocks that are a range of a shard."""
    version = _version(shard.size, shard.stamp)
    end = min(start + size, shard.size)
    pieces = []
    for first in range(start - start % BLOCK_BYTES, end, BLOCK_BYTES):
        last = min(first + BLOCK_BYTES, shard.size)
        name = _digest(f"{shard.path}\0{first}\0{BLOCK_BYTES}").hex()
        at = max(start, first)
        until = min(end, last)
        pieces.append(_Piece(_Entry(name, shard.path, first, last, version), at - first, until - at))
    return pieces


def _joined(answers: Sequence[_Answer], size: int) -> _Answer:
    """Join the parts of a sample; return the first error if there is one."""
    found = []
    for answer in answers:
        if isinstance(answer, str):
            return answer
        found.append(answer)
    data = b"".join(found)
    return data if len(data) == size > 0 else TOO_SHORT if size else "empty file"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _version(size: int, stamp: str) -> bytes:
    return hashlib.blake2b(f"{size} {stamp}".encode(), digest_size=VERSION_BYTES).digest()
