"""Reads files behind URLs, on any file system that fsspec supports."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import unescape
from itertools import count
from typing import Any, NamedTuple, NoReturn, TypeVar, final
from urllib.parse import unquote, urljoin

from gpuflow.errors import MissingExtra, ServerFault, SourceError, is_system_fault, reason_of, redacted, system_fault
from gpuflow.runtime.threads import DaemonPool, stop_flag
from gpuflow.sources.storage.base import Allocate, Payload, ReadAt, Shard, is_over_http
from gpuflow.sources.storage.http import (
    Fetched,
    HttpRequests,
    NoRanges,
    Refusal,
    TimeLimits,
    data_of,
    delay_before,
    options_of,
    shard_of,
)
from gpuflow.sources.storage.local import PERMANENT

_FIRST = 16
_LEAST = 1
_MOST = 128
_POLL_SECONDS = 0.1


class WaitEnded(Exception):
    """The storage was closed, or nobody needs what this thread waits for any more."""


@final
class RequestLimit:
    """A limit on concurrent requests, shared by all threads that use a storage.

    It starts low, because a server with a short queue of connections drops what comes all at once. It grows by one
    each time that as many requests as it allows were answered, and is halved where the server seems overloaded. While
    the server asks to be left alone, no request is sent.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._limit = _FIRST
        self._under_way = 0
        self._answered = 0
        self._paused_until = 0.0
        self._closed = False

    @property
    def limit(self) -> int:
        return self._limit

    @contextmanager
    def requests(self, wanted: int, until: float = threading.TIMEOUT_MAX) -> Iterator[tuple[int, list[object]]]:
        """Wait until there is room, then yield how many of `wanted` requests may be sent now, and a list.

        The caller adds those that failed by overload to the list. Raises TimeoutError at the time `until`, as
        `time.monotonic` has it, and WaitEnded.
        """
        failed: list[object] = []
        with self._free:
            while self._under_way >= self._limit or time.monotonic() < self._paused_until:
                self._wait(min(until, self._paused_until) if self._under_way < self._limit else until)
                if time.monotonic() >= until:
                    raise TimeoutError("other requests to its server took the time")
            count = min(wanted, self._limit - self._under_way)
            self._under_way += count
        try:
            yield count, failed
        finally:
            with self._free:
                self._under_way -= count
                self._adjust(count - len(failed), overloaded=bool(failed))
                self._free.notify_all()

    def pause(self, seconds: float) -> None:
        """Send no request for this time."""
        with self._free:
            self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> None:
        """Wait for this time. Raises WaitEnded."""
        until = time.monotonic() + seconds
        with self._free:
            while time.monotonic() < until:
                self._wait(until)

    def _wait(self, until: float) -> None:
        """Wait until something may have changed, or until a time. The caller holds the lock. Raises WaitEnded."""
        if self._closed or stop_flag():
            raise WaitEnded
        self._free.wait(max(0.0, min(_POLL_SECONDS, until - time.monotonic())))

    def close(self) -> None:
        """End all waits."""
        with self._free:
            self._closed = True
            self._free.notify_all()

    def _adjust(self, answered: int, *, overloaded: bool) -> None:
        if overloaded:
            self._limit = max(_LEAST, self._limit // 2)
            self._answered = 0
            return
        self._answered += answered
        if self._answered >= self._limit:
            self._limit = min(_MOST, self._limit + 1)
            self._answered = 0


T = TypeVar("T")

_AHEAD_BYTES = 4 << 20
"""Read together where a shard is read from its start to its end."""
_THREADS = 8
_OVERLOADED = (429, 502, 503, 504)
_ASKED_TO_WAIT = (408, 425, 429)
"""Statuses below 500 of answers that do not stay the same."""
_MISSING = (404, 410)
_SAID_AFTER = 3.0
"""Seconds of failed attempts, after which a log says, once, that a server is being tried again."""
_LINK = re.compile(r"""<a\s(?:[^<>]*?\s)?href\s*=\s*(?:(["'])(.*?)\1|([^\s>]+))""", re.IGNORECASE | re.DOTALL)
"""A link of a page: its quotation mark and the address between two of them, or an address without."""
TOO_SHORT = "its server sent less than was asked for"
_NO_RANGES = "its server must support range requests, got the whole file for a part of it; copy it to one that does"
_DEEPEST = 64
"""Directories below each other; more of them are a link that leads back to its own parent."""
_LOG = logging.getLogger(__name__)


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

    A server that is away, throttles or fails is tried again as it asks, and as long as the surrounding `time_limit`
    allows. Then ServerFault is raised.

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
        self._limits = TimeLimits.current()
        self._limit = RequestLimit()
        self._over_http = is_over_http(url)
        self._down_since: float | None = None
        self._said = False
        try:
            self._fs: Any = url_to_fs(url, **(options_of(self._limits) if self._over_http else {}))[0]
        except Exception as fault:  # of the file system, which may connect here; or its package is not installed
            reason = str(fault).strip() or type(fault).__name__
            raise SourceError(f"{url} cannot be opened: {reason}; check its scheme and what it needs") from _shown(
                fault
            )
        self._fs.invalidate_cache()  # of listings, which it shares with those that were opened before
        self._http = HttpRequests(self._fs)

    def __reduce__(self) -> NoReturn:
        raise TypeError("files behind URLs are read by the process that opened them: its connections cannot be shared")

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        none = [None] * len(paths)
        return Payload.of(list(map(data_of, self.get(list(map(os.fsdecode, paths)), none, none))), allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        answers = self.get([shard.path for shard in shards], starts, ends)
        self.check_unchanged(shards, answers)
        return Payload.of(list(map(data_of, answers)), allocate)

    def check_unchanged(self, shards: Sequence[Shard], answers: Sequence[object]) -> None:
        """Raise an error if a range was too short: its shard is not the one that was indexed, or its server fails."""
        for shard in {shard for shard, answer in zip(shards, answers, strict=True) if answer == TOO_SHORT}:
            [now] = self.inspect([shard.path])
            if isinstance(now, Shard):
                raise shard.changed(now.size) if now != shard else ServerFault(f"{shard.path}: {TOO_SHORT}; check it")

    def get(self, urls: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None]) -> list[Fetched | str]:
        """Get whole files, or ranges of them; or for each why it cannot be read. Raises faults of the
        environment."""
        answers: list[Fetched | str] = [Fetched(b"")] * len(urls)
        asked = [i for i in range(len(urls)) if ends[i] is None or starts[i] != ends[i]]
        function = self._http.get if self._over_http else self._cat_file
        found = self._answers(function, [(urls[i], starts[i], ends[i]) for i in asked], self._limits.ended)
        for i, answer in zip(asked, found, strict=True):
            if isinstance(answer, NoRanges):
                raise SourceError(f"{urls[i]}: {_NO_RANGES}")
            if isinstance(answer, BaseException):
                answers[i] = _reason(answer)
            else:
                fetched = answer if isinstance(answer, Fetched) else Fetched(bytes(answer))
                answers[i] = _checked(fetched, urls[i], starts[i], ends[i])
        return answers

    def _function(self, name: str) -> Callable[..., Any]:
        """Return an operation of the file system, as a coroutine function where it has one."""
        function: Callable[..., Any] = getattr(self._fs, f"_{name}" if self._fs.async_impl else name)
        return function

    def _cat_file(self, url: str, start: int | None = None, end: int | None = None) -> Any:
        """Get a file or a range, by names: that of S3 has another parameter before `start`."""
        return self._function("cat_file")(url, start=start, end=end)

    # --- attempts ---------------------------------------------------------------------------------------------------

    def _answers(
        self, function: Callable[..., Any], items: Sequence[tuple[Any, ...]], longest: float = math.inf
    ) -> list[Any]:
        """Return what a function returns for each item, whose first part is its URL; or the exception of every attempt.

        longest: seconds for all attempts together.

        Raises faults of the environment: ServerFault, or that of a system call.
        """
        begun = self._begun()
        answers: list[Any] = [None] * len(items)
        waiting = list(range(len(items)))
        for attempt in count(1):
            found = self._attempt(function, [items[i] for i in waiting], begun + longest)
            asked = waiting[: len(found)]
            rest = waiting[len(found) :]
            for i, answer in zip(asked, found, strict=True):
                answers[i] = answer
            failed = [i for i in asked if _is_temporary(answers[i])]
            if len(failed) < len(asked):
                self._down_since = None
                if longest == math.inf:  # nobody waits for a batch
                    begun = time.monotonic()
            waiting = rest + failed
            if not waiting:
                return answers
            self._wait(attempt, begun, items[waiting[-1]][0], [answers[i] for i in failed])
        raise AssertionError("attempts have no end")

    def _begun(self) -> float:
        """Return the time that attempts which begin now are counted from: a server is away for all threads."""
        now = time.monotonic()
        since = self._down_since
        return now if since is None else min(now, since)

    def _wait(self, attempt: int, begun: float, url: str, faults: Sequence[BaseException]) -> None:
        """Wait before the next attempt. Raises the fault of the last one if there is no time for another."""
        now = time.monotonic()
        begun = min(begun, self._begun())
        if self._down_since is None:
            self._down_since = begun
        left = begun + self._limits.tried - now
        fault = faults[-1] if faults else TimeoutError("other requests to its server took the time")
        if left <= 0:
            self._down_since = None
            raise self._lasting(url, fault, now - begun)
        asked = max((fault.retry_after for fault in faults if isinstance(fault, Refusal)), default=0.0)
        if asked:
            self._limit.pause(min(asked, left))
        delay = min(max(asked, delay_before(attempt)), left)
        if not self._said and now + delay - begun > _SAID_AFTER:
            self._said = True
            reason = redacted(reason_of(fault, with_type=not isinstance(fault, Refusal)))
            _LOG.warning("%s: %s; trying again for %.0f s", _server_of(url), reason, left)
        self.sleep(delay)

    def _lasting(self, url: str, fault: BaseException, seconds: float) -> BaseException:
        """Return the error for a fault of the environment that every attempt met."""
        if is_system_fault(fault):
            return system_fault(fault, url)
        reason = reason_of(fault, with_type=not isinstance(fault, Refusal))
        timeout = self._limits.timeout
        error = ServerFault(
            f"{_server_of(url)}: {reason}; tried for {seconds:.1f} s, as run.timeout_s = {timeout:g} allows; check "
            f"that it can be reached and allows this many requests, or raise run.timeout_s; it was asked for {url}"
        )
        error.__cause__ = _shown(fault)
        return error

    def _attempt(self, function: Callable[..., Any], items: Sequence[tuple[Any, ...]], until: float) -> list[Any]:
        """Return what a function returns for each item, or an exception; of the first ones, if the server is
        overloaded."""
        answers: list[Any] = []
        while len(answers) < len(items):
            try:
                with self._limit.requests(len(items) - len(answers), until) as (number, failed):
                    part = items[len(answers) : len(answers) + number]
                    found = self._called(function, part, until - time.monotonic())
                    failed += filter(_is_overload, found)
            except TimeoutError:
                break
            except WaitEnded:
                raise ServerFault("what read from a server was ended") from None
            answers += found
            if failed:
                break
        return answers

    def _called(self, function: Callable[..., Any], items: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """Return what `_attempt` returns; calls all at once where the file system can."""
        if self._fs.async_impl:
            from fsspec.asyn import sync

            async def call_all() -> list[Any]:
                limit = None if seconds == math.inf else seconds
                calls = (asyncio.wait_for(function(*item), limit) for item in items)
                return await asyncio.gather(*calls, return_exceptions=True)

            answers: list[Any] = sync(self._fs.loop, call_all)
            return answers

        def call(item: tuple[Any, ...]) -> Any:
            try:
                return function(*item)
            except Exception as fault:  # file systems of fsspec raise any exception of their library
                return fault

        return list(map(call, items))

    def sleep(self, seconds: float) -> None:
        """Wait for this time, or raise ServerFault once the storage, or what reads it, is ended."""
        try:
            self._limit.sleep(seconds)
        except WaitEnded:
            raise ServerFault("what read from a server was ended") from None

    # --- whole files, directories and shards --------------------------------------------------------------------------

    def load(self, path: str) -> bytes:
        function = self._http.get if self._over_http else self._cat_file
        [answer] = self._answers(function, [(path,)])
        if isinstance(answer, BaseException):
            action = "check the address" if _is_missing(answer) else "check that it can be read"
            raise SourceError(f"{path}: {_reason(answer)}; {action}") from _shown(answer)
        return answer.data if isinstance(answer, Fetched) else bytes(answer)

    def find(self, root: str) -> list[FoundFile]:
        """List all files below `root`, in no particular order. A directory that cannot be listed raises
        SourceError."""
        found = self._find(root)
        start = len(self._fs._strip_protocol(root).rstrip("/")) + 1
        files = []
        for whole, info in found.items():
            path = whole[start:]
            name = unquote(path, errors="surrogateescape") if self._over_http else path
            known = shard_of(path, info, info.get("size") or 0)
            files.append(FoundFile(name, path, known.size if known else 0, known.stamp if known else ""))
        return files

    def _find(self, root: str) -> dict[str, Mapping[str, Any]]:
        """List what is known of all files below `root`, by their paths.

        It comes from the listing of the file system itself where it has one, as object stores do. For others fsspec
        would list directory by directory, and leave out those that it cannot list.
        """
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        kind = type(self._fs)
        walks = kind.find is AbstractFileSystem.find and getattr(kind, "_find", None) in (None, AsyncFileSystem._find)
        if not walks:
            found: dict[str, Mapping[str, Any]] = self._listed(partial(self._function("find"), detail=True), root, root)
            return found
        files: dict[str, Mapping[str, Any]] = {}
        waiting = [(self._fs._strip_protocol(root), 0)]
        while waiting:
            directory, depth = waiting.pop()
            for path, entry in self._entries(directory, root).items():
                if entry["type"] != "directory":
                    files[path] = entry
                elif path != directory.rstrip("/"):
                    waiting.append((path, depth + 1))
            if depth == _DEEPEST:
                raise SourceError(
                    f"{directory}: lies {depth} directories below {root}; remove the link that leads back"
                )
        return files

    def _listed(self, function: Callable[..., Any], directory: str, root: str) -> Any:
        """Return what a function says of a directory; nothing if that is the root and missing. Raises SourceError."""
        [answer] = self._answers(function, [(directory,)])
        if not isinstance(answer, BaseException):
            return answer
        if _is_missing(answer) and directory in (root, self._fs._strip_protocol(root)):
            return {}
        raise SourceError(f"{directory}: {_reason(answer)}; check that it can be listed") from _shown(answer)

    def _entries(self, directory: str, root: str) -> dict[str, Mapping[str, Any]]:
        """List what is known of the files and directories right below a directory, by their paths.

        Over HTTP these are the links of the directory's page. They are found here, because fsspec ends a link at an
        apostrophe, and does not resolve `./1.jpg`, `../` and `&amp;`.
        """
        if not self._over_http:
            entries = self._listed(partial(self._function("ls"), detail=True), directory, root)
            return {entry["name"].rstrip("/"): entry for entry in entries}
        directory = directory.rstrip("/")
        here = urljoin(f"{directory}/", ".")
        found: dict[str, Mapping[str, Any]] = {}
        for quote, quoted, other in _LINK.findall(self._listed(self._http.page, directory, root) or ""):
            address = urljoin(here, unescape(quoted if quote else other))
            start, place = (url.partition("://")[2] for url in (here, address))  # a page may name http for https
            name = place.removeprefix(start)
            if place.startswith(start) and name[:1] not in ("", "?", "#"):
                found[f"{directory}/{name.rstrip('/')}"] = {"type": "directory" if name.endswith("/") else "file"}
        return found

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        function = self._http.shard if self._over_http else self._function("info")
        answers = self._answers(function, [(path,) for path in paths])
        return [
            _reason(answer)
            if isinstance(answer, BaseException)
            else _described(path, answer) or "its server does not report its size"
            for path, answer in zip(paths, answers, strict=True)
        ]

    def ask(self, urls: Sequence[str]) -> list[Shard | None]:
        """Return what the server says of each file now, in one attempt, and without a reason where that fails."""
        self._fs.invalidate_cache()  # of listings, whose versions may be older
        function = self._http.info if self._over_http else self._function("info")
        begun = self._begun()
        answers = self._attempt(function, [(url,) for url in urls], begun + self._limits.stalled)
        if not answers or all(map(_is_temporary, answers)):
            self._down_since = begun
        answers += [None] * (len(urls) - len(answers))
        return [
            None if info is None or isinstance(info, BaseException) else _described(url, info)
            for url, info in zip(urls, answers, strict=True)
        ]

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        def scan_one(shard: Shard) -> T:
            return scanner(shard, read_in_blocks(shard, partial(self._block, shard), 1, _AHEAD_BYTES))

        with DaemonPool(_THREADS, "storage") as threads:
            yield from threads.map(scan_one, shards)

    def _block(self, shard: Shard, start: int, size: int) -> bytes | str:
        [answer] = self.get([shard.path], [start], [start + size])
        self.check_unchanged([shard], [answer])
        return data_of(answer)

    def close(self) -> None:
        """End the waits of its threads. fsspec owns its connections and shares them within the process."""
        self._limit.close()


def read_in_blocks(shard: Shard, read: Callable[[int, int], bytes | str], unit: int, ahead: int) -> ReadAt:
    """Return a function that reads a shard from its start to its end, `ahead` bytes at a time.

    Args:
        read: returns the bytes from a start on, of a given number, or why they cannot be read.
        unit: blocks begin at multiples of this number of bytes.

    Raises SourceError, with that reason.
    """
    start = 0
    data = b""

    def read_at(offset: int, size: int) -> bytes:
        nonlocal start, data
        end = min(offset + size, shard.size)
        if end <= offset:
            return b""
        if not start <= offset <= end <= start + len(data):
            start = offset - offset % unit
            answer = read(start, min(max(ahead, end - start), shard.size - start))
            if isinstance(answer, str):
                raise SourceError(f"{shard.path}: {answer}; check that it can be read in ranges")
            data = answer
        return data[offset - start : end - start]

    return read_at


def _described(path: str, info: Any) -> Shard | None:
    """Return what a server says of a file; None if it does not say its size."""
    return shard_of(path, info, info.get("size")) if isinstance(info, Mapping) else info


def _server_of(url: str) -> str:
    """Return the server of a URL, or the place that has its part, such as a bucket."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if rest else url


def _shown(fault: BaseException) -> BaseException | None:
    """Return an exception of a library as the cause of an error; None if its text holds credentials."""
    return fault if redacted(str(fault)) == str(fault) else None


def _is_temporary(answer: object) -> bool:
    """Return True if an answer is a fault of the environment: another attempt may have another answer."""
    if not isinstance(answer, BaseException) or isinstance(answer, NoRanges):
        return False
    code = _code(answer)
    if code is not None:
        return code >= 500 or code in _ASKED_TO_WAIT
    if isinstance(answer, OSError):
        return not isinstance(answer, FileNotFoundError | PermissionError) and answer.errno not in PERMANENT
    is_of_the_request = isinstance(answer, ValueError) or "Credential" in type(answer).__name__
    return not is_of_the_request  # of an address that cannot be one, or without credentials


def _is_missing(fault: BaseException) -> bool:
    return isinstance(fault, FileNotFoundError) or _code(fault) in _MISSING


def _is_overload(answer: object) -> bool:
    """Return True if an answer may mean that the server has too much to do: no connection, no answer in time, or a
    status."""
    return isinstance(answer, BaseException) and _is_temporary(answer) and _code(answer) in (None, *_OVERLOADED)


def _code(fault: BaseException) -> int | None:
    """Return the status of an answer over HTTP, by the names that libraries give it; None of other faults."""
    known = vars(fault)
    return next((known[name] for name in ("code", "status_code", "status") if isinstance(known.get(name), int)), None)


def _reason(fault: BaseException) -> str:
    """Return why a file cannot be read."""
    if _is_missing(fault):
        return "no such file"
    if isinstance(fault, NoRanges):
        return _NO_RANGES
    return redacted(reason_of(fault, with_type=not isinstance(fault, Refusal)))


def _checked(fetched: Fetched, url: str, start: int | None, end: int | None) -> Fetched | str:
    """Return the data, or an error text if their length differs from the requested range."""
    size = len(fetched.data)
    if start is None or end is None or size == end - start:
        return fetched if size else "empty file"
    if size > end - start:
        raise SourceError(f"{url}: {_NO_RANGES}")
    return TOO_SHORT
