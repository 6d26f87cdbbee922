"""Reads files behind URLs, on any file system that fsspec supports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar, final
from urllib.parse import unquote

import numpy as np

from gpuflow.errors import MissingExtra, SourceError, is_system_fault, system_fault
from gpuflow.sources.payload import Allocate, Payload, lay_out
from gpuflow.sources.storage.base import ReadAt, Shard
from gpuflow.sources.storage.request_limit import RequestLimit
from gpuflow.sources.storage.retry import AFTER_RETRIES, REMOTE_DELAYS, retry, retry_each

__all__ = ["RemoteStorage"]

T = TypeVar("T")

_BLOCK_BYTES = 4 << 20

_THREADS = 8

_HTTP = ("http", "https")
_REQUEST_SECONDS, _CONNECT_SECONDS = 300.0, 5.0
"""Limits of a request over HTTP. A server whose queue of connections is full drops those that come; the client asks
again after 1, 3, 7, 15, ... s, and a new attempt comes sooner than its later ones."""
_OVERLOADED = (429, 502, 503, 504)
_TOO_SHORT = "its server sent less than was asked for"
_DEEPEST = 64
"""Directories below each other; more of them are a link that leads back to its own parent."""


@final
class RemoteStorage:
    """Files behind a URL, through fsspec: s3://, gs://, http://, memory:// and others.

    Args:
        url: any address on the file system; the part before its path selects the file system.
    """

    remote = True

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as absent:
            raise MissingExtra(f"reading {url}", "fsspec", "remote") from absent
        self._limit = RequestLimit()
        self._over_http = url.partition("://")[0] in _HTTP
        try:
            self._fs: Any = url_to_fs(url, **(_http_options() if self._over_http else {}))[0]
        except (ImportError, ValueError) as fault:  # the protocol needs another package, or is unknown
            raise SourceError(f"{url} cannot be opened: {fault}; check its scheme and what it needs") from fault

    def __reduce__(self) -> NoReturn:
        raise TypeError("files behind URLs are read by the process that opened them: its connections cannot be shared")

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        return self._read([os.fsdecode(path) for path in paths], [None] * len(paths), [None] * len(paths), allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        payload = self._read([shard.path for shard in shards], starts, ends, allocate)
        for shard in {shards[i] for i, error in enumerate(payload.errors) if error == _TOO_SHORT}:
            now = self._inspect(shard.path)
            if isinstance(now, Shard) and now != shard:
                raise shard.changed(now.size)
        return payload

    def _read(
        self, urls: list[str], starts: Sequence[int | None], ends: Sequence[int | None], allocate: Allocate
    ) -> Payload:
        found = [b""] * len(urls)
        errors: list[str | None] = [None] * len(urls)
        refused: dict[int, BaseException] = {}

        def attempt(items: Sequence[int]) -> Sequence[int]:
            again = []
            refused.clear()
            for i, answer in zip(items, self._fetch(items, urls, starts, ends), strict=True):
                if isinstance(answer, FileNotFoundError):
                    errors[i] = "no such file"
                elif isinstance(answer, BaseException):
                    errors[i] = _describe(answer) + AFTER_RETRIES
                    again.append(i)
                    if is_system_fault(answer):
                        refused[i] = answer
                else:
                    found[i], errors[i] = _checked(bytes(answer), starts[i], ends[i])
            return again

        retry_each(range(len(urls)), attempt, REMOTE_DELAYS)
        for i, fault in refused.items():
            raise system_fault(fault, urls[i])
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
        answers: list[Any] = []
        while len(answers) < len(items):
            with self._limit.requests(len(items) - len(answers)) as (count, failed):
                some = items[len(answers) : len(answers) + count]
                try:
                    answers += self._fs.cat_ranges(
                        [urls[i] for i in some], [starts[i] for i in some], [ends[i] for i in some], on_error="return"
                    )
                except Exception as fault:  # file systems of fsspec raise whatever their library raises
                    answers += [fault] * count
                failed += filter(_is_overload, answers[-count:])
        return answers

    def load(self, path: str) -> bytes:
        try:
            return bytes(retry(lambda: self._fs.cat_file(path), (FileNotFoundError,), REMOTE_DELAYS))
        except FileNotFoundError as fault:
            raise SourceError(f"{path}: no such file; check the address") from fault
        except Exception as fault:  # as above
            raise SourceError(f"{path}: {_describe(fault)}{AFTER_RETRIES}; check that it can be read") from fault

    def find(self, root: str) -> list[tuple[str, str]]:
        """All files below `root`, in no particular order: the name and the path of each, both relative to it.

        They differ over HTTP alone, where a path is percent-encoded. A directory that cannot be listed raises
        SourceError.
        """
        try:
            found = self._find(root)
        except SourceError:
            raise
        except FileNotFoundError:
            return []
        except Exception as fault:  # as above
            raise _cannot_be_listed(root, fault) from fault
        start = len(self._fs._strip_protocol(root).rstrip("/")) + 1
        paths = [path[start:] for path in found]
        names = [unquote(path, errors="surrogateescape") for path in paths] if self._over_http else paths
        return list(zip(names, paths, strict=True))

    def _find(self, root: str) -> list[str]:
        """All files below `root`, by the listing of the file system itself where it has one, as object stores do.

        For others fsspec would list directory by directory, and leave out those that it cannot list.
        """
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        kind = type(self._fs)
        walks = kind.find is AbstractFileSystem.find and getattr(kind, "_find", None) in (None, AsyncFileSystem._find)
        if not walks:
            found: list[str] = retry(lambda: self._fs.find(root), (FileNotFoundError,), REMOTE_DELAYS)
            return found
        files, waiting = [], [(self._fs._strip_protocol(root), 0)]
        while waiting:
            directory, depth = waiting.pop()
            try:
                entries = self._ls(directory)
            except FileNotFoundError as fault:
                if not depth:
                    raise
                raise _cannot_be_listed(directory, fault) from fault
            for entry in entries:
                path = entry["name"].rstrip("/")
                if entry["type"] != "directory":
                    files.append(path)
                elif path != directory.rstrip("/"):
                    waiting.append((path, depth + 1))
            if depth == _DEEPEST:
                raise SourceError(
                    f"{directory}: lies {depth} directories below {root}; remove the link that leads back"
                )
        return files

    def _ls(self, directory: str) -> list[dict[str, Any]]:
        """The entries of one directory."""
        try:
            return list(retry(lambda: self._fs.ls(directory, detail=True), (FileNotFoundError,), REMOTE_DELAYS))
        except FileNotFoundError:
            raise
        except Exception as fault:  # as above
            raise _cannot_be_listed(directory, fault) from fault

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(self._inspect, paths))

    def _inspect(self, path: str) -> Shard | str:
        try:
            # None is permanent: over HTTP any failure comes as FileNotFoundError
            info = retry(lambda: self._fs.info(path), (), REMOTE_DELAYS)
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
                return retry(lambda: scan_one(shard), (SourceError, FileNotFoundError), REMOTE_DELAYS)
            except SourceError:
                raise
            except Exception as fault:  # as above
                raise SourceError(f"{shard.path}: {_describe(fault)}; check that it can be read in ranges") from fault

        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(scan_with_retries, shards)

    def close(self) -> None:
        """Nothing to close: fsspec owns its connections and shares them within the process."""


def _http_options() -> dict[str, Any]:
    """How fsspec connects to servers, under what the user's configuration of fsspec says."""
    from aiohttp import ClientTimeout
    from fsspec.config import conf

    known: dict[str, Any] = {}
    for protocol in _HTTP:
        known |= conf.get(protocol, {}).get("client_kwargs", {})
    timeout = ClientTimeout(total=_REQUEST_SECONDS, sock_connect=_CONNECT_SECONDS)
    return {"client_kwargs": {"timeout": timeout, **known}}


def _cannot_be_listed(directory: str, fault: Exception) -> SourceError:
    what = "no such file" if isinstance(fault, FileNotFoundError) else _describe(fault) + AFTER_RETRIES
    return SourceError(f"{directory}: {what}; check that it can be listed")


def _is_overload(answer: object) -> bool:
    """Whether an answer may mean that the server has too much to do: no connection, no answer in time, or a status."""
    if not isinstance(answer, Exception) or isinstance(answer, (FileNotFoundError, PermissionError)):
        return False
    return getattr(answer, "status", None) in (None, *_OVERLOADED)


def _describe(fault: BaseException) -> str:
    text = str(fault)
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def _checked(data: bytes, start: int | None, end: int | None) -> tuple[bytes, str | None]:
    """The data and None; or empty bytes and an error text, if the length differs from the requested range."""
    if not data and start == end:
        return b"", "empty file"
    if start is None or end is None or len(data) == end - start:
        return data, None
    if len(data) > end - start:
        return b"", f"its server sent {len(data)} bytes for a range of {end - start}; it must support range requests"
    return b"", _TOO_SHORT
