"""Reads files behind URLs, on any file system that fsspec supports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

import numpy as np

from gpuflow.errors import MissingExtra, SourceError
from gpuflow.sources.payload import Allocate, Payload, lay_out
from gpuflow.sources.storage.base import ReadAt, Shard
from gpuflow.sources.storage.retry import AFTER_RETRIES, retry, retry_each

__all__ = ["RemoteStorage"]

T = TypeVar("T")

_BLOCK_BYTES = 4 << 20

_THREADS = 8


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
        except (ImportError, ValueError) as fault:  # the protocol needs another package, or is unknown
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

        def attempt(items: Sequence[int]) -> Sequence[int]:
            again = []
            for i, answer in zip(items, self._fetch(items, urls, starts, ends), strict=True):
                if isinstance(answer, FileNotFoundError):
                    errors[i] = "no such file"
                elif isinstance(answer, Exception):
                    errors[i] = _describe(answer) + AFTER_RETRIES
                    again.append(i)
                else:
                    found[i], errors[i] = _checked(bytes(answer), starts[i], ends[i])
            return again

        retry_each(range(len(urls)), attempt)
        sizes = [len(data) for data in found]
        offsets, end = lay_out(sizes)
        buffer = allocate(end)
        for offset, size, data in zip(offsets, sizes, found, strict=True):
            buffer[offset : offset + size] = np.frombuffer(data, dtype=np.uint8)
        return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)

    def _fetch(
        self, items: Sequence[int], urls: list[str], starts: Sequence[int | None], ends: Sequence[int | None]
    ) -> list[Any]:
        """For each item its bytes or an exception. Asynchronous file systems of fsspec fetch the items concurrently."""
        try:
            answers: list[Any] = self._fs.cat_ranges(
                [urls[i] for i in items], [starts[i] for i in items], [ends[i] for i in items], on_error="return"
            )
        except Exception as fault:  # file systems of fsspec raise whatever their library raises
            return [fault] * len(items)
        return answers

    def load(self, path: str) -> bytes:
        try:
            return bytes(retry(lambda: self._fs.cat_file(path), (FileNotFoundError,)))
        except FileNotFoundError as fault:
            raise SourceError(f"{path}: no such file; check the address") from fault
        except Exception as fault:  # as above
            raise SourceError(f"{path}: {_describe(fault)}{AFTER_RETRIES}; check that it can be read") from fault

    def find(self, root: str) -> list[str]:
        """All files below `root`, relative to it, in no particular order."""
        try:
            found = retry(lambda: self._fs.find(root), (FileNotFoundError,))
        except FileNotFoundError:
            return []
        except Exception as fault:  # as above
            raise SourceError(f"{root}: {_describe(fault)}{AFTER_RETRIES}; check that it can be listed") from fault
        start = len(self._fs._strip_protocol(root).rstrip("/")) + 1
        return [name[start:] for name in found]

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(self._inspect, paths))

    def _inspect(self, path: str) -> Shard | str:
        try:
            info = retry(lambda: self._fs.info(path), ())  # over HTTP any failure comes as FileNotFoundError
        except FileNotFoundError:
            return "no such file"
        except Exception as fault:  # as above
            return _describe(fault) + AFTER_RETRIES
        if info.get("size") is None:
            return "its server does not report its size"
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
            with self._fs.open(shard.path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as file:

                def read_at(offset: int, size: int) -> bytes:
                    file.seek(offset)
                    return bytes(file.read(size))

                return scanner(shard, read_at)

        def scan_with_retries(shard: Shard) -> T:
            try:
                return retry(lambda: scan_one(shard), (SourceError, FileNotFoundError))
            except SourceError:
                raise
            except Exception as fault:  # as above
                raise SourceError(f"{shard.path}: {_describe(fault)}; check that it can be read in ranges") from fault

        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(scan_with_retries, shards)

    def close(self) -> None:
        """Nothing to close: fsspec owns its connections and shares them within the process."""


def _describe(fault: Exception) -> str:
    text = str(fault)
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def _checked(data: bytes, start: int | None, end: int | None) -> tuple[bytes, str | None]:
    """The data and None; or empty bytes and an error text, if the length differs from the requested range."""
    if not data:
        return b"", "empty file"
    if start is None or end is None or len(data) == end - start:
        return data, None
    if len(data) > end - start:
        return b"", f"its server sent {len(data)} bytes for a range of {end - start}; it must support range requests"
    return b"", f"its shard ends after {len(data)} of {end - start} bytes; it shrank since it was indexed"
