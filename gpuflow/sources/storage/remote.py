"""Reads files behind URLs, on any file system that fsspec supports."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import unescape
from typing import Any, NamedTuple, NoReturn, TypeVar, final
from urllib.parse import unquote, urljoin

import numpy as np

from gpuflow.errors import MissingExtra, SourceError, is_system_fault, reason_of, system_fault
from gpuflow.runtime.threads import DaemonPool
from gpuflow.sources.payload import Allocate, Payload, lay_out
from gpuflow.sources.storage.base import HTTP, ReadAt, Shard, is_over_http
from gpuflow.sources.storage.request_limit import RequestLimit
from gpuflow.sources.storage.retry import REMOTE_DELAYS, after_retries, retry, retry_each

__all__ = ["TOO_SHORT", "FoundFile", "RemoteStorage", "payload_of"]

T = TypeVar("T")

_BLOCK_BYTES = 4 << 20

_THREADS = 8

_REQUEST_SECONDS, _CONNECT_SECONDS = 300.0, 5.0
"""Limits of a request over HTTP. A server whose queue of connections is full drops those that come; the client asks
again after 1, 3, 7, 15, ... s, and a new attempt comes sooner than its later ones."""
_OVERLOADED = (429, 502, 503, 504)
_MISSING, _FORBIDDEN = (404, 410), (401, 403)
"""Statuses of answers that stay the same."""
_PAGE = "text/html"
_LINK = re.compile(r"""<a\s(?:[^<>]*?\s)?href\s*=\s*(?:(["'])(.*?)\1|([^\s>]+))""", re.IGNORECASE | re.DOTALL)
"""A link of a page: its quotation mark and the address between two of them, or an address without."""
TOO_SHORT = "its server sent less than was asked for"
_DEEPEST = 64
"""Directories below each other; more of them are a link that leads back to its own parent."""
_TAGS = ("ETag", "etag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "mtime", "updated", "created")
"""What changes with an object, by the names that file systems of fsspec give it."""


class FoundFile(NamedTuple):
    """A file below a directory: its name and its path, relative to that, and its stamp as in `Shard`, if it is listed.

    Name and path differ over HTTP alone, where a path is percent-encoded.
    """

    name: str
    path: str
    size: int
    stamp: str


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
        if "::" in url:
            raise SourceError(f"{url} chains file systems by '::', which gpuflow does not read; copy the files first")
        self._limit = RequestLimit()
        self._over_http = is_over_http(url)
        try:
            self._fs: Any = url_to_fs(url, **(_http_options() if self._over_http else {}))[0]
        except Exception as fault:  # of the file system, which may connect here; or its package is not installed
            reason = str(fault).strip() or type(fault).__name__
            raise SourceError(f"{url} cannot be opened: {reason}; check its scheme and what it needs") from fault
        self._fs.invalidate_cache()  # of listings, which it shares with those that were opened before

    def __reduce__(self) -> NoReturn:
        raise TypeError("files behind URLs are read by the process that opened them: its connections cannot be shared")

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        found, errors = self.get(list(map(os.fsdecode, paths)), [None] * len(paths), [None] * len(paths))
        return payload_of(found, errors, allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        found, errors = self.get([shard.path for shard in shards], starts, ends)
        self.check_unchanged(shards, errors)
        return payload_of(found, errors, allocate)

    def check_unchanged(self, shards: Sequence[Shard], errors: Sequence[str | None]) -> None:
        """Raise SourceError if a range was too short because its shard is not the one that was indexed."""
        for shard in {shard for shard, error in zip(shards, errors, strict=True) if error == TOO_SHORT}:
            now = self._inspect(shard.path)
            if isinstance(now, Shard) and now != shard:
                raise shard.changed(now.size)

    def get(
        self, urls: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None]
    ) -> tuple[list[bytes], list[str | None]]:
        """Whole files, or ranges of them, and for each why it cannot be read. Raises faults of the environment."""
        found = [b""] * len(urls)
        errors: list[str | None] = [None] * len(urls)
        refused: dict[int, BaseException] = {}

        def attempt(items: Sequence[int]) -> Sequence[int]:
            again = []
            refused.clear()
            for i, answer in zip(items, self._fetch(items, urls, starts, ends), strict=True):
                if isinstance(answer, BaseException):
                    errors[i] = _reason(answer)
                    if not _is_permanent(answer):
                        again.append(i)
                        if is_system_fault(answer):
                            refused[i] = answer
                else:
                    found[i], errors[i] = _checked(bytes(answer), starts[i], ends[i])
            return again

        retry_each(range(len(urls)), attempt, REMOTE_DELAYS)
        for i, fault in refused.items():
            raise system_fault(fault, urls[i])
        return found, errors

    def _fetch(
        self, items: Sequence[int], urls: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None]
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
                except Exception as fault:  # file systems of fsspec raise any exception of their library
                    answers += [fault] * count
                failed += filter(_is_overload, answers[-count:])
        return answers

    def load(self, path: str) -> bytes:
        try:
            return bytes(retry(lambda: self._fs.cat_file(path), _is_permanent, REMOTE_DELAYS))
        except Exception as fault:  # as above
            action = "check the address" if _is_missing(fault) else "check that it can be read"
            raise SourceError(f"{path}: {_reason(fault)}; {action}") from fault

    def find(self, root: str) -> list[FoundFile]:
        """All files below `root`, in no particular order. A directory that cannot be listed raises SourceError."""
        try:
            found = self._find(root)
        except SourceError:
            raise
        except Exception as fault:  # as above
            if _is_missing(fault):
                return []
            raise _cannot_be_listed(root, fault) from fault
        start = len(self._fs._strip_protocol(root).rstrip("/")) + 1
        files = []
        for whole, info in found.items():
            path = whole[start:]
            name = unquote(path, errors="surrogateescape") if self._over_http else path
            files.append(FoundFile(name, path, int(info.get("size") or 0), _stamp(info)))
        return files

    def _find(self, root: str) -> dict[str, Mapping[str, Any]]:
        """What is known of all files below `root`, by their paths.

        It comes from the listing of the file system itself where it has one, as object stores do. For others fsspec
        would list directory by directory, and leave out those that it cannot list.
        """
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        kind = type(self._fs)
        walks = kind.find is AbstractFileSystem.find and getattr(kind, "_find", None) in (None, AsyncFileSystem._find)
        if not walks:
            found: dict[str, Mapping[str, Any]] = retry(
                lambda: self._fs.find(root, detail=True), _is_permanent, REMOTE_DELAYS
            )
            return found
        files: dict[str, Mapping[str, Any]] = {}
        waiting = [(self._fs._strip_protocol(root), 0)]
        while waiting:
            directory, depth = waiting.pop()
            try:
                entries = retry(partial(self._entries, directory), _is_permanent, REMOTE_DELAYS)
            except Exception as fault:  # as above
                if not depth:
                    raise
                raise _cannot_be_listed(directory, fault) from fault
            for path, entry in entries.items():
                if entry["type"] != "directory":
                    files[path] = entry
                elif path != directory.rstrip("/"):
                    waiting.append((path, depth + 1))
            if depth == _DEEPEST:
                raise SourceError(
                    f"{directory}: lies {depth} directories below {root}; remove the link that leads back"
                )
        return files

    def _entries(self, directory: str) -> dict[str, Mapping[str, Any]]:
        """What is known of the files and directories right below a directory, by their paths.

        Over HTTP these are the links of the directory's page. They are found here, because fsspec ends a link at an
        apostrophe, and does not resolve `./1.jpg`, `../` and `&amp;`.
        """
        if not self._over_http:
            return {entry["name"].rstrip("/"): entry for entry in self._fs.ls(directory, detail=True)}
        directory = directory.rstrip("/")
        here = urljoin(f"{directory}/", ".")
        found: dict[str, Mapping[str, Any]] = {}
        for quote, quoted, other in _LINK.findall(self._page(directory)):
            address = urljoin(here, unescape(quoted if quote else other))
            start, place = (url.partition("://")[2] for url in (here, address))  # a page may name http for https
            name = place.removeprefix(start)
            if place.startswith(start) and name[:1] not in ("", "?", "#"):
                found[f"{directory}/{name.rstrip('/')}"] = {"type": "directory" if name.endswith("/") else "file"}
        return found

    def _page(self, url: str) -> str:
        """The text of a page; empty for another file."""
        from fsspec.asyn import sync

        async def load() -> str:
            session = await self._fs.set_session()
            async with session.get(self._fs.encode_url(url), **self._fs.kwargs) as answer:
                answer.raise_for_status()
                is_page = answer.headers.get("Content-Type", _PAGE).startswith(_PAGE)
                return str(await answer.text(errors="replace")) if is_page else ""

        return str(sync(self._fs.loop, load))

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        with DaemonPool(_THREADS, "storage") as threads:
            return list(threads.map(self._inspect, paths))

    def _inspect(self, path: str) -> Shard | str:
        try:
            info = retry(lambda: self._fs.info(path), _is_permanent, REMOTE_DELAYS)
        except Exception as fault:  # as above
            return _reason(fault)
        return _shard(path, info) or "its server does not report its size"

    def ask(self, urls: Sequence[str]) -> list[Shard | None]:
        """As `inspect`, in one attempt, and without a reason where that fails."""
        found: list[Shard | None] = []
        while len(found) < len(urls):
            with self._limit.requests(len(urls) - len(found)) as (count, failed):
                some = urls[len(found) : len(found) + count]
                answers = self._infos(some)
                failed += filter(_is_overload, answers)
                found += [
                    None if isinstance(info, BaseException) else _shard(url, info)
                    for url, info in zip(some, answers, strict=True)
                ]
        return found

    def _infos(self, urls: Sequence[str]) -> list[Any]:
        """What the server says about each file, or an exception; all at once where the file system can."""
        if self._fs.async_impl:
            from fsspec.asyn import sync

            async def ask() -> list[Any]:
                return await asyncio.gather(*map(self._fs._info, urls), return_exceptions=True)

            answers: list[Any] = sync(self._fs.loop, ask)
            return answers

        def info(url: str) -> Any:
            try:
                return self._fs.info(url)
            except Exception as fault:  # as above
                return fault

        with DaemonPool(_THREADS, "storage") as threads:
            return list(threads.map(info, urls))

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        def scan_one(shard: Shard) -> T:
            with self._fs.open(shard.path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as file:

                def read_at(offset: int, size: int) -> bytes:
                    file.seek(offset)
                    return bytes(file.read(size))

                return scanner(shard, read_at)

        def scan_with_retries(shard: Shard) -> T:
            try:
                return retry(
                    lambda: scan_one(shard),
                    lambda fault: isinstance(fault, SourceError) or _is_permanent(fault),
                    REMOTE_DELAYS,
                )
            except SourceError:
                raise
            except Exception as fault:  # as above
                raise SourceError(f"{shard.path}: {_reason(fault)}; check that it can be read in ranges") from fault

        with DaemonPool(_THREADS, "storage") as threads:
            yield from threads.map(scan_with_retries, shards)

    def close(self) -> None:
        """Nothing to close: fsspec owns its connections and shares them within the process."""


def payload_of(found: Sequence[bytes], errors: Sequence[str | None], allocate: Allocate) -> Payload:
    """Files, or why each cannot be read, in one buffer."""
    sizes = [len(data) for data in found]
    offsets, end = lay_out(sizes)
    buffer = allocate(end)
    for offset, size, data in zip(offsets, sizes, found, strict=True):
        buffer[offset : offset + size] = np.frombuffer(data, dtype=np.uint8)
    return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)


def _shard(path: str, info: Mapping[str, Any]) -> Shard | None:
    """What a server says about a file; None if it does not say its size."""
    size = info.get("size")
    return None if size is None else Shard(path=path, size=int(size), stamp=_stamp(info))


def _stamp(info: Mapping[str, Any]) -> str:
    return next((str(info[tag]) for tag in _TAGS if info.get(tag)), "")


def _http_options() -> dict[str, Any]:
    """How fsspec connects to servers, under what the user's configuration of fsspec says."""
    from aiohttp import ClientTimeout
    from fsspec.config import conf

    known: dict[str, Any] = {}
    for protocol in HTTP:
        known |= conf.get(protocol, {}).get("client_kwargs", {})
    timeout = ClientTimeout(total=_REQUEST_SECONDS, sock_connect=_CONNECT_SECONDS)
    return {"client_kwargs": {"timeout": timeout, **known}}


def _cannot_be_listed(directory: str, fault: Exception) -> SourceError:
    return SourceError(f"{directory}: {_reason(fault)}; check that it can be listed")


def _is_permanent(fault: BaseException) -> bool:
    """Whether a server would answer the same again: the file is not there, or must not be read."""
    fault = _answer(fault)
    return _is_missing(fault) or isinstance(fault, PermissionError) or _status(fault) in _FORBIDDEN


def _is_missing(fault: BaseException) -> bool:
    fault = _answer(fault)
    return isinstance(fault, FileNotFoundError) or _status(fault) in _MISSING


def _is_overload(answer: object) -> bool:
    """Whether an answer may mean that the server has too much to do: no connection, no answer in time, or a status."""
    if not isinstance(answer, Exception) or _is_permanent(answer):
        return False
    return _status(_answer(answer)) in (None, *_OVERLOADED)


def _answer(fault: BaseException) -> BaseException:
    """What failed: over HTTP, fsspec's `info` raises FileNotFoundError for any failure, which is its cause."""
    cause = fault.__cause__
    over_http = isinstance(cause, OSError) or type(cause).__module__.partition(".")[0] == "aiohttp"
    return cause if cause is not None and over_http and isinstance(fault, FileNotFoundError) else fault


def _status(fault: BaseException) -> int | None:
    """The status of an answer over HTTP; None of other faults."""
    status = getattr(fault, "status", None)
    return status if isinstance(status, int) else None


def _reason(fault: BaseException) -> str:
    """Why something cannot be read, and whether it was tried again."""
    if _is_missing(fault):
        return "no such file"
    described = reason_of(_answer(fault), with_type=True)
    return described if _is_permanent(fault) else described + after_retries(REMOTE_DELAYS)


def _checked(data: bytes, start: int | None, end: int | None) -> tuple[bytes, str | None]:
    """The data and None; or empty bytes and an error text, if the length differs from the requested range."""
    if not data and start == end:
        return b"", "empty file"
    if start is None or end is None or len(data) == end - start:
        return data, None
    if len(data) > end - start:
        return b"", f"its server sent {len(data)} bytes for a range of {end - start}; it must support range requests"
    return b"", TOO_SHORT
